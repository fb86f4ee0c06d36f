"""Statistics of features: their definitions, identities, and clients side by side."""

import pytest
import torch

from raypfl.methods.feature_statistics import FeatureSums, feature_sums, kept, mean_centroids, num_features
from raypfl.training import SGD, TrainingConfig, cohort

TRAINING = TrainingConfig(epochs=1, batch_size=3, optimizer=SGD(lr=0.1))


@pytest.fixture
def deep(make_toy):
    return make_toy(sizes=(7, 1, 10, 5), hidden=4, training=TRAINING, dtype=torch.float64)


def features(toy, rows, client):
    own = toy.indices[client]
    return toy.net.bind(rows[client : client + 1]).features(toy.x[own][None])[0], toy.y[own]


def sums_of(z, y, classes=3):
    """The sums of one client, sample by sample."""
    total = torch.zeros(1, classes, z.shape[1], dtype=torch.float64)
    for sample, label in zip(z.double(), y.tolist(), strict=True):
        total[0, label] += sample
    return FeatureSums(total, z.double().square().sum()[None], y.bincount(minlength=classes)[None])


@pytest.mark.parametrize("pass_batch", [2, 1000])
@pytest.mark.parametrize("how", ["extracted", "kept"])
def test_sums_are_those_of_each_client(deep, monkeypatch, pass_batch, how):
    """Also where a pass takes several batches, of which the last are padded."""
    monkeypatch.setattr(cohort, "PASS_BATCH", pass_batch)
    rows, everybody = deep.rows(), deep.cohort(deep.plan())
    if how == "kept":
        found = feature_sums(everybody.on_features(rows), rows, kept)
    else:
        found = feature_sums(everybody, rows)
    for client in range(4):
        expected = sums_of(*features(deep, rows, client))
        for field, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(field[client], exact[0], rtol=1e-12, atol=1e-13)


def test_mean_and_variance_are_those_of_the_matrix_of_label_and_feature(deep):
    """V n is the trace of the covariance of `e_y z'`; the authors' form by class gives the same."""
    rows = deep.rows()
    found = feature_sums(deep.cohort(deep.plan()), rows)
    for client in range(4):
        z, y = features(deep, rows, client)
        outer = torch.nn.functional.one_hot(y, 3).double()[:, :, None] * z[:, None]
        torch.testing.assert_close(found.mean()[client], outer.mean(0), rtol=1e-12, atol=1e-14)
        n = len(y)
        trace = (outer - outer.mean(0)).square().sum() / n
        torch.testing.assert_close(found.variance()[client], trace / n, rtol=1e-11, atol=1e-14)
        share = y.bincount(minlength=3).double() / n
        by_class = sum(
            share[k] * z[y == k].square().sum(1).mean() - share[k] ** 2 * z[y == k].mean(0).square().sum()
            for k in range(3)
            if share[k] > 0
        )
        torch.testing.assert_close(found.variance()[client], by_class / n, rtol=1e-11, atol=1e-14)


def test_one_sample_has_no_variance_and_absent_classes_no_rows(deep):
    found = feature_sums(deep.cohort(deep.plan()), deep.rows())
    assert float(found.variance()[1]) < 1e-15
    assert (found.variance()[[0, 2, 3]] > 0).all()
    absent = found.count_KC == 0
    assert absent.any()
    assert (found.mean()[absent] == 0).all() and (found.centroids()[absent] == 0).all()
    present = found.centroids() * found.count_KC[:, :, None]
    torch.testing.assert_close(present, found.sum_KCD, rtol=1e-12, atol=1e-14)


def test_twice_the_samples_halve_the_variance():
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1, 1, 2])
    once, twice = sums_of(z, y), sums_of(z.repeat(2, 1), y.repeat(2))
    torch.testing.assert_close(2 * twice.variance(), once.variance(), rtol=1e-12, atol=0)
    torch.testing.assert_close(twice.mean(), once.mean(), rtol=1e-12, atol=0)


def test_float32_features_are_summed_in_float64(make_toy):
    """Features of 1000 and little else: their variance is lost in float32 sums."""
    toy = make_toy(sizes=(200,), hidden=4, training=TRAINING)
    rows = toy.rows(scale=1e-3)
    rows[:, toy.net.extractor.stop - 4 : toy.net.extractor.stop] = 1000.0
    z, y = features(toy, rows, 0)
    assert z.dtype == torch.float32
    found = feature_sums(toy.cohort(toy.plan()), rows)
    outer = torch.nn.functional.one_hot(y, 3).double()[:, :, None] * z.double()[:, None]
    trace = (outer - outer.mean(0)).square().sum() / 200
    torch.testing.assert_close(found.variance()[0], trace / 200, rtol=1e-9, atol=0)


def test_global_centroids_weigh_clients_by_their_samples_of_the_class():
    """`sum_k (sum_i n_ik) c_ik = sum_i n_i * mean feature of i`, and a mean of two and one by hand."""
    counts = torch.tensor([[2, 0, 3], [1, 0, 5]])
    centroid = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centroid[counts == 0] = 0.0
    found = mean_centroids(counts, centroid)
    torch.testing.assert_close(found[0, 0], (2 * centroid[0, 0] + centroid[1, 0]) / 3, rtol=1e-13, atol=0)
    assert (found[0, 1] == 0).all() and found.shape == (1, 3, 4)
    total = (counts.sum(0)[:, None] * found[0]).sum(0)
    sums = (counts[:, :, None] * centroid).sum((0, 1))
    torch.testing.assert_close(total, sums, rtol=1e-12, atol=1e-13)


def test_global_centroids_of_equal_clients_are_theirs():
    centroid = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).expand(7, -1, -1)
    assert torch.equal(mean_centroids(torch.tensor([[3, 1, 2]]).expand(7, -1), centroid)[0], centroid[0])


def test_inputs_of_the_head(deep):
    assert num_features(deep.net, 3) == 4
