"""The files that set rankbus up agree with each other."""

import configparser
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from bus.config import Config
from frontend import supervision

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.+]*)", line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match]
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in matches if match}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_locks_pin_everything_once(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert len(_pins(path)) == len(lines) > 10


def test_the_lock_holds_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = _pins(ROOT / "requirements" / "cpu.lock")
    for requirement in project["dependencies"] + project["optional-dependencies"]["cpu"]:
        name, operator, version = re.fullmatch(r"([\w.-]+)(>=|==)([\d.]+)", requirement).groups()  # type: ignore[union-attr]
        have, want = ([int(part) for part in text.split(".")] for text in (pins[name], version))
        assert have >= want if operator == ">=" else have == want, requirement


def test_the_second_make_installs_nothing(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in ("stamp-venv", "stamp-cpu", "stamp-self", "stamp-dev"):
        (venv / name).touch()
    for target, command in (
        ("test", f"{venv}/bin/python -m pytest tests"),
        ("serve", f"exec {venv}/bin/rankbus serve"),
    ):
        outside = {
            name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS")) and name != "T"
        }
        told = subprocess.run(
            ["make", "--dry-run", f"VENV={venv}", target],
            cwd=ROOT,
            env=outside,  # the tests themselves are run by make
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == command


def test_ci_runs_what_the_readme_says() -> None:
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "make" in ci.read_text()
    assert "make test" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["raw_zmq.py", "generate.py"])
def test_the_readme_shows_the_examples_as_they_are(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    body = text[text.index("\nimport ") :].strip()
    assert f"```python\n{body}\n```" in (ROOT / "README.md").read_text()


def test_what_the_readme_links_to_is_there() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^):#]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"


def test_supervisord_treats_all_processes_alike() -> None:
    text = supervision.fill_in((ROOT / "supervisord.conf").read_text(), Config(ranks=3, run_dir="/some/where"))
    assert "%(ENV_R" not in text
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    parser.read_string(text)
    programs = {name.partition(":")[2]: dict(parser[name]) for name in parser.sections() if name.startswith("program:")}
    assert set(programs) == {"frontend", "rank", "executor"} == set(parser["group:rankbus"]["programs"].split(","))
    assert programs["rank"]["numprocs"] == "3"
    for program in programs.values():
        assert (program["autorestart"], program["exitcodes"], program["startsecs"]) == ("unexpected", "0,78", "0")
        assert program["stdout_logfile"].startswith("/some/where/log/")
    own = ("command", "numprocs", "process_name", "stdout_logfile")
    settings = [{key: value for key, value in program.items() if key not in own} for program in programs.values()]
    assert settings[0] == settings[1] == settings[2]


def test_executors_on_other_hosts_are_started_there() -> None:
    template = (ROOT / "supervisord.conf").read_text()
    here = Config(executors=3)
    elsewhere = Config(executors=3, follower_address="tcp://leader:5557", curve_key_file="key")
    for config, count in ((here, 3), (elsewhere, 1)):
        parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
        parser.read_string(supervision.fill_in(template, config))
        assert parser["program:executor"]["numprocs"] == str(count)


def test_a_percent_sign_in_a_path_survives() -> None:
    text = supervision.fill_in("directory = %(ENV_RANKBUS_RUN_DIR)s/log", Config(run_dir="/a%b"))
    assert text == "directory = /a%%b/log"
