"""The copy of a program's code: what is in it, and what is not."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from worldsize.errors import ConfigError
from worldsize.launch import snapshot


def tree(folder: Path, **files: str) -> Path:
    """A folder with files: a__b_py is a/b.py."""
    for name, text in files.items():
        *folders, last = name.split("__")
        path = folder.joinpath(*folders, last.replace("_", ".", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def git(folder: Path, *words: str) -> None:
    """A git command in a folder, as nobody in particular."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository: one file committed, then edited; one new; one ignored; one deleted."""
    made = tree(tmp_path / "repo", train_py="committed", gone_py="x", lib__part_py="part", _gitignore="out/\n*.bin\n")
    git(made.parent, "init", str(made))
    git(made, "add", ".")
    git(made, "commit", "-m", "x")
    tree(made, train_py="edited", new_py="new", out__big_bin="ignored")
    (made / "gone.py").unlink()
    return made


def taken(root: Path, **asked: object) -> dict[str, str]:
    """The files of a copy, with their text."""
    into = root.parent / "job" / "code"
    snapshot.take(root, into, **asked)  # type: ignore[arg-type]
    return {str(path.relative_to(into)): path.read_text() for path in into.rglob("*") if path.is_file()}


def test_uncommitted_edits_are_in_it_and_ignored_files_are_not(root: Path) -> None:
    """What git tracks as it is now, and what it would offer to add."""
    found = taken(root)
    assert found == {"train.py": "edited", "new.py": "new", "lib/part.py": "part", ".gitignore": "out/\n*.bin\n"}


def test_part_of_a_repository_may_be_the_root(root: Path) -> None:
    """Paths count from there."""
    assert taken(root / "lib") == {"part.py": "part"}


def test_suffixes_and_folders_choose(root: Path) -> None:
    """As pack_code of a Slurm function does."""
    assert set(taken(root, suffixes=(".py",), exclude=("lib/",))) == {"train.py", "new.py"}


def test_without_git_all_that_is_not_hidden_is_code(tmp_path: Path) -> None:
    """But no environments, caches, runs and jobs."""
    root = tree(
        tmp_path / "plain", train_py="a", env__pyvenv_cfg="", env__lib__x_py="", runs__a__run_json="", runs__a__log_txt="",
        jobs__one__script_sh="", jobs__one__spec_json="", jobs__one__code__train_py="old",
    )  # fmt: skip
    for name in (".hidden", "__pycache__"):
        tree(root / name, x_py="")
    assert taken(root) == {"train.py": "a"}


def test_a_copy_below_its_root_does_not_copy_itself(root: Path) -> None:
    """A job's folder often lies in the folder of the code."""
    snapshot.take(root, root / "jobs" / "one" / "code")
    snapshot.take(root, root / "jobs" / "one" / "code", exclude=("jobs",))
    assert not (root / "jobs" / "one" / "code" / "jobs").exists()


def test_too_much_is_refused_with_the_largest_files(root: Path) -> None:
    """Nothing is copied."""
    tree(root, data_npy="x" * 3_000_000)
    with pytest.raises(ConfigError, match=r"2\.9 MiB, more than 1\.0 MiB.*the largest: data\.npy \(2\.9 MiB\)"):
        taken(root, cap=snapshot.MEBIBYTE)
    assert not (root.parent / "job").exists()


def test_links_stay_links(root: Path) -> None:
    """A data folder that is linked is not copied."""
    (root / "data").symlink_to("/usr")
    into = root.parent / "code"
    snapshot.take(root, into)
    assert (into / "data").readlink() == Path("/usr")


def test_repositories_inside_it_are_taken_too(root: Path) -> None:
    """A submodule is code."""
    inner = tree(root / "sub", a_py="inner", _gitignore="")
    git(root, "init", str(inner))
    git(inner, "add", ".")
    git(inner, "commit", "-m", "x")
    git(root, "add", "sub")
    assert taken(root)["sub/a.py"] == "inner"


def test_the_root_is_the_repository_or_the_scripts_folder(root: Path, tmp_path: Path) -> None:
    """Where nobody says it."""
    assert snapshot.root_of(root / "lib" / "part.py") == root
    assert snapshot.root_of(tree(tmp_path / "plain", train_py="") / "train.py") == tmp_path / "plain"


def test_folders_that_python_imports_from_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which packages are installed as editable, and PYTHONPATH; not the environment itself."""
    finder = types.ModuleType("finder")
    finder.__dict__["MAPPING"] = {"package": str(tmp_path / "packages" / "package")}
    monkeypatch.setitem(sys.modules, "finder", finder)
    monkeypatch.setattr(sys, "meta_path", [type("Finder", (), {"__module__": "finder"}), *sys.meta_path])
    monkeypatch.setattr(sys, "path", ["", *(str(tmp_path / name) for name in ("src", "env/lib/site")), "/usr/lib"])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    assert snapshot.imported_from(tmp_path) == [tmp_path / "packages", tmp_path / "src"]


def test_those_of_another_environment_are_read_there(tmp_path: Path) -> None:
    """In its files of paths."""
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "e.pth").write_text(f"import x\n{tmp_path}/src\n/elsewhere\n{site}/more\n", encoding="utf-8")
    assert snapshot.imported_from(tmp_path, tmp_path / "env") == [tmp_path / "src"]
