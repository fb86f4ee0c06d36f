"""The tables of a sweep, to read. Percent appears only here and in the figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from raypfl.records.grid import Grid, markdown
from raypfl.sweep.results import PointResult, Row, Spread

CHOSEN = {
    "validation": "best round on validation, chosen without the test split",
    "test": "best round, chosen on test, as the papers report: optimistic",
}


def summary_of(
    name: str, points: Sequence[PointResult], best: Mapping[str, PointResult], rows: Sequence[Row], on: str
) -> str:
    """The document.

    Args:
        name: of the sweep.
        points: its points, in order.
        best: the best of all, or of each group.
        rows: its trials.
        on: the split that points are chosen on.
    """
    counts = Counter(row["status"] for row in rows)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    seconds = sum(row["seconds"] or 0.0 for row in rows)
    parts = [f"# {name}", f"{len(points)} points, {len(rows)} trials ({told}), {seconds:.0f} s of trials."]
    if on == "validation":
        parts += ["## Chosen on validation", markdown(chosen_table(points, on)), *_reported(best)]
        parts += ["## As the papers report: best round on test"]
    else:
        parts += ["## Chosen on test, as the papers report"]
        parts += [
            "There is no validation split, so rounds and points are chosen on the test split: these figures "
            "are optimistic. With `partition.validation_fraction` they are chosen on validation."
        ]
    parts += [markdown(table) for table in (cross_table(points), paper_table(points)) if table is not None]
    failed = [row for row in rows if row["status"] == "failed"]
    if failed:
        parts += ["## Failed", "\n".join(f"- `{row['trial']}`: {row['error']}" for row in failed)]
    return "\n\n".join(parts) + "\n"


def chosen_table(points: Sequence[PointResult], on: str) -> Grid:
    """Points by score, best first; points that are not complete last."""
    keys = keys_of(points)
    ordered = sorted(points, key=lambda p: -p.measures["score"].mean if p.complete else 1.0)
    rows = tuple(
        (*_values(point, keys), str(len(point.statuses)), *_mean_sd(point, "score"), _status(point))
        for point in ordered
    )
    return Grid(
        (*keys, "seeds", on, "sd", "status"),
        rows,
        words=len(keys),
        note=f"Accuracy on {on} in %, mean and sd over seeds: {CHOSEN[on]}.",
    )


def paper_table(points: Sequence[PointResult]) -> Grid:
    """Test accuracy of every point: best round on test, last round, last ten."""
    keys = keys_of(points)
    rows = tuple(
        (
            *_values(point, keys),
            str(len(point.statuses)),
            *_mean_sd(point, "best_test"),
            *_mean_sd(point, "last_test"),
            *_mean_sd(point, "last_ten_test"),
            _status(point),
        )
        for point in points
    )
    header = (*keys, "seeds", "best", "sd", "last", "sd", "last ten", "sd", "status")
    return Grid(
        header,
        rows,
        words=len(keys),
        note=f"Test accuracy in %, mean and sd over seeds. best: {CHOSEN['test']}; last: the last evaluated "
        "round; last ten: mean of the last ten evaluated.",
    )


def cross_table(points: Sequence[PointResult], measure: str = "best_test") -> Grid | None:
    """Two keys against each other, where two vary and every point has both; else None."""
    keys = varied(points)
    if len(keys) != 2 or any(set(point.values) < set(keys) for point in points):
        return None
    down, across = keys
    columns = list(dict.fromkeys(text(point.values[across]) for point in points))
    cells: dict[str, dict[str, str]] = {}
    for point in points:
        cell = show(point.measures[measure]) if point.complete else _status(point)
        cells.setdefault(text(point.values[down]), {})[text(point.values[across])] = cell
    rows = tuple((first, *(cell.get(column, "") for column in columns)) for first, cell in cells.items())
    return Grid(
        (f"{down} \\ {across}", *columns),
        rows,
        note=f"Test accuracy in %, mean ± sd over seeds: {CHOSEN['test']}.",
    )


def show(spread: Spread) -> str:
    """Percent, with the deviation where there is one."""
    return f"{100 * spread.mean:.2f}" + ("" if spread.sd is None else f" ± {100 * spread.sd:.2f}")


def keys_of(points: Sequence[PointResult]) -> tuple[str, ...]:
    """All keys of the points."""
    return tuple(dict.fromkeys(key for point in points for key in point.values))


def varied(points: Sequence[PointResult]) -> tuple[str, ...]:
    """The keys that have more than one value; of keys that change together the first."""
    found: dict[tuple[int, ...], str] = {}
    for key in keys_of(points):
        values = [text(point.values.get(key)) for point in points]
        # Which points have the same value as which.
        pattern = tuple(values.index(value) for value in values)
        if len(set(pattern)) > 1:
            found.setdefault(pattern, key)
    return tuple(found.values())


def text(value: object) -> str:
    """A value for a table."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value)


def _reported(best: Mapping[str, PointResult]) -> list[str]:
    return [
        f"**Test accuracy of the chosen point{f' ({group})' if group else ''}, once:** "
        f"{show(point.measures['test'])} with "
        f"{', '.join(f'{key} = {text(value)}' for key, value in point.values.items())}."
        for group, point in best.items()
        if "test" in point.measures
    ]


def _values(point: PointResult, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(text(point.values[key]) if key in point.values else "" for key in keys)


def _mean_sd(point: PointResult, measure: str) -> tuple[str, str]:
    spread = point.measures.get(measure)
    if spread is None:
        return "", ""
    return f"{100 * spread.mean:.2f}", "" if spread.sd is None else f"{100 * spread.sd:.2f}"


def _status(point: PointResult) -> str:
    counts = Counter(point.statuses)
    return ", ".join(status if len(counts) == 1 else f"{count} {status}" for status, count in counts.items())
