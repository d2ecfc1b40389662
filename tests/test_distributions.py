# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What `tests/distributions.py` finds in archives with a fault, and what surrounds a package. Builds no wheel."""

from __future__ import annotations

import copy
import email.policy
import io
import re
import tarfile
import tomllib
import zipfile
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import environments
import pytest

pytest.importorskip("trove_classifiers", reason="the group `dev` is not installed")
pytest.importorskip("hatch_fancy_pypi_readme", reason="the group `dev` is not installed")

import distributions
from distributions import PLACEHOLDER, ROOT, chosen, in_turn, metadata_problems, notes, problems
from environments import Interpreter
from hatch_fancy_pypi_readme._builder import build_text
from hatch_fancy_pypi_readme._config import load_and_validate_config

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BASE = PROJECT["urls"]["Source"]
WHEEL = "jax_fastattn-0.1.0-cp313-cp313-manylinux_2_34_x86_64.whl"
SDIST = "jax_fastattn-0.1.0.tar.gz"


def index_page(readme: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the page that the build makes of a README.md."""
    (folder / "README.md").write_text(readme.read_text())
    monkeypatch.chdir(folder)
    # It takes entries out of what it reads.
    config = load_and_validate_config(
        copy.deepcopy(PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"])
    )
    return build_text(config.fragments, config.substitutions, version="0.1.0", package_name="jax_fastattn")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return index_page(ROOT / "README.md", tmp_path, monkeypatch)


def metadata(page: str, **replaced: list[str]) -> EmailMessage:
    """Returns the metadata of an archive whose headers `replaced` are others."""
    message = EmailMessage(policy=email.policy.default.clone(max_line_length=0))
    urls = [f"{label}, {url}" for label, url in PROJECT["urls"].items()]
    for name, values in {"Classifier": PROJECT["classifiers"], "Project_URL": urls, **replaced}.items():
        for value in values:
            message[name.replace("_", "-")] = value
    message.set_payload(page, "utf-8")
    return message


def wheel(folder: Path, content: EmailMessage, without: str = "", name: str = WHEEL) -> Path:
    """Writes a wheel without one file."""
    names = {"jax_fastattn/py.typed", "jax_fastattn/ffi/_ffi.cpython-313-x86_64-linux-gnu.so"}
    with zipfile.ZipFile(folder / name, "w") as file:
        file.writestr("jax_fastattn-0.1.0.dist-info/METADATA", content.as_bytes())
        for each in names - {without}:
            file.writestr(each, "")
    return folder / name


def sdist(folder: Path, content: EmailMessage, names: tuple[str, ...]) -> Path:
    """Writes an sdist with empty files of these names."""
    root = SDIST.removesuffix(".tar.gz")
    with tarfile.open(folder / SDIST, "w:gz") as file:
        for name, data in {"PKG-INFO": content.as_bytes(), **dict.fromkeys(names, b"")}.items():
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return folder / SDIST


def test_a_whole_wheel_and_a_whole_sdist_have_no_problem(page: str, tmp_path: Path) -> None:
    assert problems(wheel(tmp_path, metadata(page))) == []
    assert problems(sdist(tmp_path, metadata(page), ("jax_fastattn/py.typed", "csrc/module.cc"))) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    {
        "py.typed": ({"without": "jax_fastattn/py.typed"}, "it lacks jax_fastattn/py.typed"),
        "extension": (
            {"without": "jax_fastattn/ffi/_ffi.cpython-313-x86_64-linux-gnu.so"},
            "it has 0 C++ extensions; expected 1",
        ),
        "tag": ({"name": WHEEL.replace("manylinux_2_34", "linux")}, "its platform tag is not manylinux"),
    }.values(),
    ids=["py.typed", "extension", "tag"],
)
def test_a_fault_of_a_wheel_is_found(change: dict[str, str], problem: str, page: str, tmp_path: Path) -> None:
    (found,) = problems(wheel(tmp_path, metadata(page), **change))
    assert found.startswith(problem)


@pytest.mark.parametrize("name", ["notebook/page.md", ".ci/run"])
def test_an_sdist_with_more_than_is_listed_is_found(name: str, page: str, tmp_path: Path) -> None:
    (found,) = problems(sdist(tmp_path, metadata(page), ("jax_fastattn/py.typed", name)))
    assert found == f"it has {name.partition('/')[0]}, which the list of `SDIST` lacks"


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("[page](docs/semantics.md)", "the page of the index has a relative link, docs/semantics.md"),
        ("[![plot](https://a.example/b.png)](docs/a.md)", "the page of the index has a relative link, docs/a.md"),
        ('<img src="plot.png">', "the page of the index has a relative link, plot.png"),
        ("```python\nx[0](https://x)\n```", "the substitutions that make links absolute change code in README.md"),
    ],
)
def test_a_link_that_an_index_cannot_follow_is_found(added: str, problem: str, page: str) -> None:
    assert metadata_problems(metadata(f"{page}\n{added}\n")) == [problem]


def test_a_classifier_that_no_index_knows_and_a_missing_address_are_found(page: str) -> None:
    found = metadata_problems(metadata(page, Classifier=["Typing :: Typo"], Project_URL=[f"Homepage, {BASE}"]))
    missing = sorted(distributions.URLS - {"Homepage"})
    assert found == ["no index knows the classifier Typing :: Typo", *(f"project.urls lacks {x}" for x in missing)]


def test_links_of_the_index_page_lead_to_files_of_the_repository(page: str) -> None:
    links = re.findall(rf"\]\({re.escape(BASE)}/(?:blob|raw)/HEAD/([^)#\s]+)", page)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_kind_of_link_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "input.md"
    readme.write_text(
        "[a](docs/a.md#b) ![plot](x/y.png) [![plot](y.png)](docs/c.md) [web](https://d.example/e) [here](#f)\n"
    )
    assert index_page(readme, tmp_path, monkeypatch) == (
        f"[a]({BASE}/blob/HEAD/docs/a.md#b) ![plot]({BASE}/raw/HEAD/x/y.png) "
        f"[![plot]({BASE}/raw/HEAD/y.png)]({BASE}/blob/HEAD/docs/c.md) [web](https://d.example/e) [here](#f)\n"
    )


def test_the_address_of_the_project_is_the_same_everywhere() -> None:
    replacements = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    texts = [*PROJECT["urls"].values(), *(x["replacement"].partition("(")[2] for x in replacements)]
    assert [text for text in texts if not f"{text}/".startswith(f"{BASE}/")] == []


def python(version: str, place: str = "/usr/bin") -> Interpreter:
    major, minor, micro = map(int, version.split("."))
    return Interpreter(f"{place}/python{major}.{minor}", (major, minor, micro))


def test_each_minor_version_that_the_tests_can_run_has_a_wheel() -> None:
    """Of several the newest one; of equals the first one, as elsewhere. jax has no wheels for Python 3.15."""
    wanted = [python("3.11.7"), python("3.12.4"), python("3.13.0", "/pyenv")]
    others = [python("3.12.1"), python("3.13.0", "/shims"), python("3.15.0")]
    assert chosen([*reversed(wanted), *others], newest=(3, 13)) == wanted


def test_pythons_take_turns() -> None:
    pythons = [python("3.11.7"), python("3.12.4"), python("3.13.0")]
    assert in_turn(pythons, None) == pythons
    assert [in_turn(pythons, turn) for turn in (6, 7, 8)] == [[pythons[0]], [pythons[1]], [pythons[2]]]


def test_notes_before_an_upload(page: str) -> None:
    classifiers = [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12)]
    content = metadata(page, Classifier=classifiers, Project_URL=[f"Source, {PLACEHOLDER}x"])
    assert notes(content, [python("3.11.7"), python("3.13.0")]) == [
        "no wheel was tried with Python 3.12, which the classifiers name",
        "Python 3.13 works, and the classifiers do not name it",
        f"project.urls still name {PLACEHOLDER}, an address that leads nowhere",
    ]
    assert notes(metadata(page, Classifier=classifiers, Project_URL=[]), [python("3.11.7"), python("3.12.1")]) == []


@pytest.mark.parametrize(
    ("readme", "code"),
    [
        ("text\n```sh\nls\n```\n```python\nx = 4096\n```\n```python\ny = 1\n```\n", "x = 96\n"),
        ("no code", None),
    ],
)
def test_the_quickstart_is_the_first_python_example(
    readme: str, code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(readme)
    monkeypatch.setattr(distributions, "ROOT", tmp_path)
    if code is None:
        with pytest.raises(SystemExit, match="no Python example"):
            distributions.quickstart()
    else:
        assert distributions.quickstart() == code


def test_a_command_that_fails_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="false failed; see above"):
        distributions.must(["false"])
    assert "false" in capsys.readouterr().out


def constrained(name: str) -> list[str]:
    """Returns the versions that the newest environment gives a package."""
    return re.findall(rf"^{name}==(\S+)", environments.NEWEST.constraints_file.read_text(), re.MULTILINE)


def test_hooks_before_a_commit_have_the_linters_of_the_tests() -> None:
    pins = re.findall(r"\b([a-z-]+)==([\w.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert {name for name, _ in pins} == {"ruff", "import-linter", "pyright"}
    assert [(name, version) for name, version in pins if constrained(name) != [version]] == []


def test_the_workflow_runs_what_ci_runs_with_each_python_of_the_classifiers() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    steps: list[dict[str, Any]] = yaml.safe_load(text)["jobs"]["all"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    (versions,) = (step["with"]["python-version"].split() for step in steps if "setup-python" in step.get("uses", ""))
    named = [x.rpartition(" ")[2] for x in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", x)]
    assert versions == named
    assert "has not run" in text
