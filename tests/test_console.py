import io

import pytest
from rich.console import Console as Terminal

from raypfl.console import Console, LiveConsole, PlainConsole, RunTitle, console_for
from raypfl.records.grid import Grid, fitting

GRID = Grid(("method", "accuracy"), (("fed[amp]", "71.25"),))


WIDE = Grid(
    ("method", "worst decile", "last ten", "interval"),
    (("diversifed", "85.00", "1,234.56", "-22.46 to -4.65"),),
    note="What it is.",
)


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def drive(console):
    """Two runs in sequence, the second resumed; a name that rich would take for markup."""
    with console:
        console.begin(RunTitle("fed[amp]", rounds=4, number=1, runs=2))
        console.round(1, seconds=2.0, clients=10, accuracy=None)
        console.round(2, seconds=4.0, clients=20, accuracy=0.7125)
        console.note("saved")
        again = RunTitle(
            "fedavg", rounds=9, done=8, figure="global, pre", number=2, runs=2, folder="a/fedavg"
        )
        console.begin(again)
        console.round(9, seconds=60.0, clients=30, accuracy=0.5)
        console.table(GRID)


def test_plain_lines_one_a_round():
    drive(PlainConsole(stream := io.StringIO()))
    assert stream.getvalue().splitlines() == [
        "[1/2] fed[amp]: 4 rounds",
        "fed[amp]  round 1/4  5.0 clients/s  ETA 0:00:06",
        "fed[amp]  round 2/4  accuracy 71.25% (personalised, post)  5.0 clients/s  ETA 0:00:06",
        "saved",
        "[2/2] a/fedavg: 9 rounds, resumed after round 8",
        "a/fedavg  round 9/9  accuracy 50.00% (global, pre)  0.5 clients/s  ETA 0:00:00",
        "method    accuracy",
        "--------  --------",
        "fed[amp]     71.25",
    ]


def test_live_bars_end_with_every_run(monkeypatch):
    stream = FakeTerminal()
    terminal = Terminal(file=stream, force_terminal=True, width=140, color_system=None)
    drive(LiveConsole(terminal))
    shown = stream.getvalue()
    last_frame = shown[shown.rindex("[1/2] fed[amp]") :]
    first, second = last_frame.splitlines()[:2]
    assert "2/4" in first
    assert "71.25% (personalised, post)" in first
    assert "5.0 clients/s" in first
    assert "ETA 0:00:06" in first
    assert second.startswith("[2/2] fedavg")
    assert "9/9" in second
    assert "50.00% (global, pre)" in second
    assert "saved" in shown
    assert "71.25 " in shown


def test_the_screen_is_given_back_after_an_error():
    stream = FakeTerminal()
    with pytest.raises(KeyboardInterrupt), LiveConsole(Terminal(file=stream, force_terminal=True)) as console:
        console.begin(RunTitle("fedavg", rounds=2))
        raise KeyboardInterrupt
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_the_stream_decides(monkeypatch):
    assert isinstance(console_for(FakeTerminal()), LiveConsole)
    assert isinstance(console_for(io.StringIO()), PlainConsole)


def test_standard_output_is_the_default(capsys):
    with console_for() as console:
        console.note("hello")
    assert capsys.readouterr() == ("hello\n", "")


def test_the_base_shows_nothing(capsys):
    drive(Console())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 40])
def test_a_narrow_terminal_has_the_table_in_parts_and_every_number_whole(width):
    stream = FakeTerminal()
    LiveConsole(Terminal(file=stream, width=width, color_system=None)).table(WIDE)
    shown = stream.getvalue()
    assert all(cell in shown for cell in WIDE.rows[0]) and "…" not in shown
    assert shown.rstrip().endswith("What it is.")
    assert max(map(len, shown.splitlines())) <= width


def test_parts_of_a_table_repeat_its_first_column():
    first, second = fitting(WIDE, 33, between=3)
    assert first.header == ("method", "worst decile", "last ten") and first.note == ""
    assert second == Grid(("method", "interval"), (("diversifed", "-22.46 to -4.65"),), 1, "What it is.")
    assert fitting(WIDE, 100, between=3) == [WIDE]
