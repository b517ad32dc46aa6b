"""The command line finds its commands, and shows settings as a file that says the same."""

from pathlib import Path

import pytest

from bus import config as configuration
from frontend import cli, show_config


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["rankbus", *arguments])
    return cli.main()


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_is_there(name: str) -> None:
    module = cli.COMMANDS[name].module
    assert Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py").exists()


def test_an_unknown_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "sevre") == 2
    assert "there is no command sevre; there are serve, config" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--port", "0"), ("--prot", "1"), ("--port",)])
def test_a_bad_setting_is_refused_with_code_78(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert _run(monkeypatch, "config", *arguments) == 78
    assert capsys.readouterr().err.count("\n") == 1


def test_settings_are_shown_with_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rankbus.toml"
    file.write_text('ranks = 3\nport = 1\nmax_num_seqs = 4\nmodel = "a \\"b\\" #c"\n')
    monkeypatch.setenv("RANKBUS_CONFIG", str(file))
    monkeypatch.setenv("RANKBUS_PORT", "2")
    monkeypatch.setenv("RANKBUS_MAX_NUM_SEQS", "5")
    assert _run(monkeypatch, "config", "--max-num-seqs=6") == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["ranks"].split() == ["ranks", "=", "3", "#", str(file)]
    assert lines["port"].split() == ["port", "=", "2", "#", "RANKBUS_PORT"]
    assert lines["max_num_seqs"].split() == ["max_num_seqs", "=", "6", "#", "--max-num-seqs"]
    assert lines["frontends"].split() == ["frontends", "=", "1", "#", "default"]
    again = tmp_path / "again.toml"
    again.write_text(shown)
    expected = configuration.load({"max_num_seqs": "6"})
    assert configuration.load({}, {}, again) == expected
    assert show_config.render(expected, dict.fromkeys(lines, "x") | configuration.origins()).count("\n") > 20
