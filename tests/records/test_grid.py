from raypfl.records.grid import Grid, markdown, plain

GRID = Grid(("name", "accuracy"), (("a|b", "9.50"), ("local", "10.25")), note="in %")


def test_plain_is_aligned():
    assert plain(GRID).splitlines() == [
        "name   accuracy",
        "-----  --------",
        "a|b        9.50",
        "local     10.25",
        "in %",
    ]


def test_markdown_escapes_its_own_signs():
    assert markdown(GRID).splitlines() == [
        "| name | accuracy |",
        "| --- | --: |",
        "| a\\|b | 9.50 |",
        "| local | 10.25 |",
        "",
        "in %",
    ]


def test_a_table_without_rows_is_its_header():
    assert plain(Grid(("a", "b"), ())).splitlines() == ["a  b", "-  -"]
