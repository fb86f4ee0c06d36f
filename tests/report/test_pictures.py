"""What pictures show is what the tables have; they are read from the figures themselves."""

import numpy as np
import pytest
from made import entries, made_run

from raypfl.errors import StorageError
from raypfl.report import clients, collaboration, curves, partition, resources
from raypfl.report.loading import read_groups
from raypfl.report.picture import Picture, apart, label_ends, new_figure, pens
from raypfl.result import Result

RISING = ((0.5, 0.6, 0.7, 0.8), (0.6, 0.7, 0.8, 0.9))


def texts(picture: Picture) -> list[str]:
    return [text.get_text() for axes in picture.figure.axes for text in axes.texts]


def line_of(picture: Picture, panel: int = 0, number: int = 0):
    return picture.figure.axes[panel].lines[number].get_data()


@pytest.fixture
def three_seeds(tmp_path):
    for seed in range(3):
        accuracy = [[value + 0.01 * seed for value in row] for row in RISING]
        made_run(tmp_path, f"fedavg-{seed}", seed=seed, accuracy=accuracy, partition=str(seed) * 64)
    return tmp_path


def test_a_line_is_the_mean_over_seeds_and_its_band_their_range(three_seeds):
    (picture,) = curves.accuracy(read_groups([three_seeds]))
    x, y = line_of(picture)
    assert x.tolist() == [1, 2]
    assert y == pytest.approx([66.0, 76.0])
    (band,) = picture.figure.axes[0].collections
    assert {round(height, 6) for height in band.get_paths()[0].vertices[:, 1]} == {65.0, 67.0, 75.0, 77.0}
    assert texts(picture) == ["fedavg"]
    assert picture.figure.axes[0].get_ylabel() == "test accuracy, mean over clients (%)"
    assert picture.alt.endswith("At the end: fedavg 76.0 %.")


def test_only_rounds_that_all_seeds_have_are_drawn(tmp_path):
    made_run(tmp_path, "a", accuracy=RISING)
    made_run(tmp_path, "b", accuracy=RISING[:1], seed=1, rounds=2)
    (picture,) = curves.accuracy(read_groups([tmp_path]))
    assert line_of(picture)[0].tolist() == [1]


def test_every_model_and_point_has_its_picture(tmp_path):
    made_run(tmp_path, "a", accuracy=RISING, view=("global", "pre"))
    made_run(tmp_path, "b", accuracy=RISING, method="local")
    pictures = curves.accuracy(read_groups([tmp_path]))
    assert [picture.name for picture in pictures] == [
        "accuracy",
        "accuracy-global-pre",
        "accuracy-personalised-post",
    ]
    assert pictures[0].title == "Test accuracy, as each paper reports it"
    assert texts(pictures[1]) == ["fedavg"] and texts(pictures[2]) == ["local"]


def test_loss_of_training_is_that_of_the_table(tmp_path):
    made_run(tmp_path, "a", accuracy=RISING)
    test, train = curves.loss(read_groups([tmp_path]))
    assert line_of(test)[1] == pytest.approx([1.0, 0.5])
    assert line_of(train)[1] == pytest.approx([0.5, 0.25])


def test_losses_of_very_different_size_are_on_a_logarithmic_axis(tmp_path):
    made_run(tmp_path, "a", accuracy=[[0.5]] * 40)
    test, _ = curves.loss(read_groups([tmp_path]))
    assert test.figure.axes[0].get_yscale() == "log"


def test_what_follows_on_the_beginning_fills_the_picture(tmp_path):
    late = [[0.90 + 0.001 * step] for step in range(30)]
    made_run(tmp_path, "a", accuracy=[[0.1], *late])
    (picture,) = curves.accuracy(read_groups([tmp_path]))
    low, high = picture.figure.axes[0].get_ylim()
    assert 89 < low < 90.6 and 92.9 < high < 94
    assert curves.CUT in picture.caption


def test_worst_decile_is_marked_and_every_client_is_a_point(tmp_path):
    made_run(tmp_path, "a", accuracy=RISING)
    (picture,) = clients.distribution(read_groups([tmp_path]))
    shown = [line.get_xdata() for line in picture.figure.axes[0].lines if line.get_marker() in (".", "D")]
    assert sorted(shown[0]) == pytest.approx([60, 70, 80, 90]) and shown[1] == pytest.approx([60])
    assert "median 75.0 %, worst decile 60.0 %" in picture.alt


def test_area_of_a_bubble_is_the_number_of_samples(tmp_path):
    made_run(tmp_path, "a")
    (picture,) = partition.bubbles(read_groups([tmp_path]))
    bubbles = picture.figure.axes[1].collections[0]
    area = {
        tuple(place): size for place, size in zip(bubbles.get_offsets(), bubbles.get_sizes(), strict=True)
    }
    # Client i has 12 samples of class i modulo 3 and i of the others.
    assert area[1, 1] / area[1, 0] == pytest.approx(12)
    assert area[3, 0] / area[3, 2] == pytest.approx(4)
    assert (0, 1) not in area
    assert "A client has 12 to 18 training samples of 1 to 3 classes, 2.5 on average" in picture.alt


def test_one_picture_a_partition(three_seeds):
    pictures = partition.bubbles(read_groups([three_seeds]))
    titles = [picture.title for picture in pictures]
    assert titles == [
        f"Training samples of each client (name dirichlet, alpha 0.3, seed {seed})" for seed in range(3)
    ]


@pytest.fixture
def collaborating(tmp_path):
    """Client 0 and 3 (both of class 0) pull each other, all other pairs push; distances are 1 and 2."""
    pull = {(0, 3), (3, 0)}
    weights, distances = np.full((4, 4), -0.1), np.full((4, 4), 2.0)
    for pair in pull:
        weights[pair], distances[pair] = 0.5, 1.0
    np.fill_diagonal(weights, 0.9)
    np.fill_diagonal(distances, 0.0)
    made_run(
        tmp_path,
        "a",
        method="diversifed",
        accuracy=[RISING[0]] * 6,
        pairs={"coefficient": weights, "distance": distances},
    )
    return tmp_path


def test_matrices_show_rounds_from_the_first_to_the_last(collaborating):
    (picture,) = collaboration.matrices(read_groups([collaborating]))
    panels = [axes for axes in picture.figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["round 1", "round 3", "round 4", "round 6"]
    image = panels[0].images[0]
    # By most frequent class: clients 0 and 3, then 1, then 2.
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == ["0", "3", "1", "2"]
    shown = image.get_array()
    assert shown[0, 1] == shown[1, 0] == 0.5 and shown[0, 2] == -0.1
    assert shown.mask.diagonal().all()
    assert "from -0.1 to 0.5" in picture.alt and "is 0.9 to 0.9" in picture.caption
    # Blue pulls, red pushes, white is nothing.
    assert image.norm.vmin == -0.5 and image.norm.vmax == 0.5


def test_distances_are_split_by_the_sign_of_the_coefficient(collaborating):
    (picture,) = collaboration.distances(read_groups([collaborating]))
    assert texts(picture) == ["pulled", "pushed"]
    assert line_of(picture, number=0)[1] == pytest.approx([1.0] * 6)
    assert line_of(picture, number=1)[1] == pytest.approx([2.0] * 6)


def test_means_stand_in_where_there_are_no_matrices(tmp_path):
    numbers = {"pulled_distance": 1.5, "pushed_distance": np.nan, "other": 9.0}
    made_run(tmp_path, "a", method="fedamp", diagnostics=numbers)
    (picture,) = collaboration.distances(read_groups([tmp_path]))
    assert texts(picture) == ["pulled"] and line_of(picture)[1] == pytest.approx([1.5, 1.5])


PEERS = [
    {"src": [0, 1, 1], "dst": [1, 0, 2], "kind": "full", "values": 10, "bytes": [40, 40, 40]},
    {"src": [0, 1, 1], "dst": [1, 0, 2], "kind": "meta", "values": 1, "bytes": 8},
]


def test_who_heard_whom_is_read_from_the_messages(tmp_path):
    made_run(tmp_path, "a", method="peer_fedavg", traffic=PEERS)
    made_run(tmp_path, "b", method="fedavg")
    (picture,) = collaboration.heard(read_groups([tmp_path]))
    shown = picture.figure.axes[0].images[0].get_array()
    ids = [tick.get_text() for tick in picture.figure.axes[0].get_yticklabels()]
    # Only those who appear; nobody heard client 2, and client 2 heard client 1 in every round.
    assert sorted(ids) == ["0", "1", "2"]
    assert shown[ids.index("2"), ids.index("1")] == 1.0
    assert shown.mask[:, ids.index("2")].all()
    assert "hears full from 1.0 others" in picture.alt


def test_load_of_the_busiest_node(tmp_path):
    made_run(tmp_path, "peers", method="peer_fedavg", traffic=PEERS)
    made_run(tmp_path, "star", method="fedavg")
    loads = {group.label: resources.load_of(group.runs[0]) for group in read_groups([tmp_path])}
    # Peer 1 sends two messages of 48 bytes and receives one; the server serves four clients.
    peers, star = loads["peer_fedavg"], loads["fedavg"]
    assert peers.sent.tolist() == [96, 96] and peers.received.tolist() == [48, 48]
    assert peers.node.tolist() == [1, 1]
    assert star.sent.tolist() == [400, 400] and star.received.tolist() == [320, 320]
    assert star.node.tolist() == [-1, -1]
    (picture,) = resources.busiest(read_groups([tmp_path]))
    assert picture.figure.axes[0].get_ylabel() == "sent (bytes a round)"
    assert "peer_fedavg: a client, 96 sent, 48 bytes received" in picture.alt
    assert "fedavg: the server, 400 sent, 320 bytes received" in picture.alt


def test_accuracy_by_bytes_counts_every_message_once(tmp_path):
    made_run(tmp_path, "a", method="peer_fedavg", traffic=PEERS, accuracy=RISING)
    picture, _ = resources.traffic(read_groups([tmp_path]))
    x, y = line_of(picture)
    assert x.tolist() == [144, 288] and y == pytest.approx([65, 75])
    assert picture.figure.axes[0].get_xlabel() == "bytes in all messages so far"


def test_training_time_is_what_is_left_of_a_round(tmp_path):
    made_run(tmp_path, "a")
    (picture,) = resources.seconds(read_groups([tmp_path]))
    widths = [bar.get_width() for bar in picture.figure.axes[0].patches]
    assert widths == [1.25, 0.25, 0.5]
    assert "training 1.2, evaluation 0.25, server 0.5" in picture.alt


def test_virtual_time_where_there_is_a_clock(tmp_path):
    made_run(tmp_path, "a", accuracy=RISING, clock=True)
    made_run(tmp_path, "b", method="local", accuracy=RISING)
    (picture,) = resources.virtual_time(read_groups([tmp_path]))
    assert line_of(picture)[0].tolist() == [10, 20] and texts(picture) == ["fedavg"]


def test_labels_are_moved_apart_and_stay_inside():
    assert apart(np.array([0.5]), 0.1).tolist() == [0.5]
    assert apart(np.array([0.5, 0.5]), 0.1) == pytest.approx([0.45, 0.55])
    assert apart(np.array([1.0, 0.99, 0.2]), 0.1) == pytest.approx([0.95, 0.85, 0.2])
    crowded = apart(np.full(10, 0.0), 0.1)
    assert sorted(crowded) == pytest.approx(np.arange(0.05, 1.0, 0.1))


def test_labels_at_the_ends_of_lines_do_not_overlap():
    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1])
    names = pens([f"method {i}" for i in range(12)])
    label_ends(axes, [(label, 1.0, 0.5, pen) for label, pen in names.items()])
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1.5 for below, above in zip(boxes, boxes[1:], strict=False))
    assert max(box.x1 for box in boxes) <= figure.bbox.x1 + 1


def test_many_settings_are_told_apart():
    assert len(set(pens([str(i) for i in range(28)]).values())) == 28


def test_results_draw_themselves(collaborating):
    result = Result(collaborating)
    assert [picture.name for picture in result.plot_distances()] == ["diversifed-distances"]
    page = result.plot_distances()._repr_html_()
    assert page.startswith("<figure><b>diversifed: distances") and "data:image/png;base64," in page
    assert set(result.pairs()["name"]) == {"coefficient", "distance"}
    assert result.partition().query("client == 3")["samples"].tolist() == [18]


def test_what_cannot_be_drawn_says_what_it_needs(tmp_path):
    made_run(tmp_path, "a")
    with pytest.raises(StorageError, match=r"nothing to draw of this kind.*evaluation\.diagnostics=true"):
        Result(tmp_path).plot_collaboration()


def test_a_picture_is_a_file_of_its_own(collaborating, tmp_path):
    (picture,) = Result(collaborating).plot_distances()
    content = picture.save(tmp_path / "own.png").read_bytes()
    assert content.startswith(b"\x89PNG") and content == picture.png


def test_entries_of_a_matrix_come_back(tmp_path):
    matrix = np.array([[np.nan, 0.25], [0.5, np.nan]])
    made_run(tmp_path, "a", pairs={"weight": matrix})
    rows = Result(tmp_path).pairs().query("round == 1")[["receiver", "source", "value"]].values.tolist()
    assert rows == [[0, 1, 0.25], [1, 0, 0.5]]
    assert entries(matrix, "weight")["value"].tolist() == [0.25, 0.5]
