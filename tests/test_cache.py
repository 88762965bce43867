"""The cache on disk: private, whole, bounded, and never an error."""

import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from jaxmagma import cache


_cache = cache._loaded()


def name(number: int, kind: str = "kernel") -> str:
    return f"{cache.digest(number)}.{kind}"


def another_process(code: str) -> "subprocess.Popen[bytes]":
    """One that has the native module as ``cache``, and waits for nothing else to be imported."""
    load = (
        "from importlib.machinery import ExtensionFileLoader as Loader\n"
        "from importlib.util import module_from_spec, spec_from_loader\n"
        f"spec = spec_from_loader('_cache', Loader('_cache', {_cache.__file__!r}))\n"
        "cache = module_from_spec(spec)\n"
        "spec.loader.exec_module(cache)\n"
    )
    return subprocess.Popen([sys.executable, "-P", "-c", load + code])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of this test's own, in folders that are yet to be made."""
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path / "base" / "cache"))
    cache._complain_of.cache_clear()
    return tmp_path / "base" / "cache"


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "/some/where")
    assert _cache.folder() == "/some/where"
    assert cache.path("x") == Path("/some/where/x")
    for off in ("", "off"):
        monkeypatch.setenv("JAXMAGMA_CACHE_DIR", off)
        assert _cache.folder() == ""
        assert cache.path("x") is None
    monkeypatch.delenv("JAXMAGMA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/base")
    assert _cache.folder() == "/base/jaxmagma"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert _cache.folder() == "/home/someone/.cache/jaxmagma"


@pytest.mark.parametrize("content", [None, [], {"a": [1, 2.5, "b", True]}, "x" * 100_000], ids=str)
def test_what_is_kept_is_found(folder: Path, content: object) -> None:
    assert cache.read(name(1)) is None
    assert cache.write(name(1), content) == ""
    assert cache.read(name(1)) == content
    assert cache.read(name(2)) is None
    cache.write(name(1), "another")
    assert cache.read(name(1)) == "another"
    assert [x.name for x in folder.iterdir()] == [name(1)]


def test_a_digest_tells_parts_apart() -> None:
    parts = ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), ("ab", "c"), (["ab", "c"],))
    assert len({cache.digest(*x) for x in parts}) == len(parts)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not ours", "older"])
def test_damaged_entries_are_missing(folder: Path, damage: str) -> None:
    cache.write(name(1), "content")
    file = folder / name(1)
    whole = file.read_bytes()
    damaged = {
        "truncated": whole[:-1],
        "flipped": whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:],
        "empty": b"",
        "not ours": b"content",
        "older": whole.replace(b"jaxmagma 2", b"jaxmagma 1", 1),
    }
    file.write_bytes(damaged[damage])
    assert cache.read(name(1)) is None
    cache.write(name(1), "content")
    assert file.read_bytes() == whole


# ---- Private ---------------------------------------------------------------------------------


def test_folders_and_files_are_this_users_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        cache.write(name(1), 1)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(x.stat().st_mode) for x in (folder.parent, folder, folder / name(1))]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, mode: int) -> None:
    cache.write(name(1), "content")
    folder.chmod(mode)
    with pytest.warns(UserWarning, match="other users can write to it") as caught:
        cache._complain_of.cache_clear()
        assert cache.read(name(1)) is None
        assert cache.write(name(2), "content") == "other users can write to it"
    assert len(caught) == 1 and str(folder) in str(caught[0].message)
    assert not (folder / name(2)).exists()
    folder.chmod(0o755)  # they may look
    assert cache.read(name(1)) == "content"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    cache.write(name(1), "content")
    os.chown(folder, 12345, -1)
    with pytest.warns(UserWarning, match="another user owns it"):
        cache._complain_of.cache_clear()
        assert cache.read(name(1)) is None
    assert cache.write(name(2), "content") == "another user owns it"


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    """Neither to read what is not ours, nor to write where somebody wants us to."""
    cache.write(name(1), "content")
    elsewhere = tmp_path / "elsewhere"
    (folder / name(1)).rename(elsewhere)
    (folder / name(1)).symlink_to(elsewhere)
    (folder / name(2)).symlink_to(tmp_path / "victim")
    whole = elsewhere.read_bytes()
    assert cache.read(name(1)) is None
    for number in (1, 2):
        assert cache.write(name(number), "new") == ""
        assert cache.read(name(number)) == "new"
        assert not (folder / name(number)).is_symlink()
    assert elsewhere.read_bytes() == whole
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "bad", ["", "x", "../" + name(1), name(1)[1:], name(1).replace(".", "/"), "A" + name(1)[1:]]
)
def test_other_names_are_no_entries(folder: Path, bad: str) -> None:
    assert cache.write(bad, "content") != ""
    assert cache.read(bad) is None
    assert not folder.exists()


# ---- Bounded ---------------------------------------------------------------------------------


def total(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.iterdir() if x.suffix != ".choice")


def test_those_that_were_read_longest_ago_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_BYTES", "100000")
    cache.write(name(1000, "choice"), "x" * 50_000)
    now = time.time()
    for number in range(8):
        cache.write(name(number), "x" * 10_000)
        os.utime(folder / name(number), (now - 86400 + number,) * 2)
    os.utime(folder / name(1000, "choice"), (0, 0))
    for number in (0, 2):  # reading counts
        assert cache.read(name(number)) is not None
    for number in range(8, 12):
        cache.write(name(number), "x" * 10_000)
        assert total(folder) <= 100_000
    left = [n for n in range(12) if cache.read(name(n)) is not None]
    assert {0, 2, 8, 9, 10, 11} <= set(left) and not {1, 3} & set(left)
    assert len(cache.read(name(1000, "choice"))) == 50_000


def test_many_writers_stay_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_BYTES", "200000")
    code = (
        "for n in range(100):\n"
        "    name = f'{writer}{n % 60:063x}.kernel'\n"
        "    assert cache.write(name, b'x' * 5000) == ''\n"
        "    assert cache.read(name) in (None, b'x' * 5000)"
    )
    writers = [another_process(f"writer = {n}\n{code}") for n in range(3)]
    assert [writer.wait() for writer in writers] == [0] * 3
    assert 100_000 < total(folder) <= 200_000 * (1 + 3 / 16) + 3 * 6000
    assert not [*folder.glob("*.tmp")]


def test_drafts_that_were_left_behind_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_BYTES", "30000")
    cache.write(name(1), "content")
    draft = folder / f"{name(2)}.host-1-2.tmp"
    draft.write_bytes(b"x" * 29_000)
    os.utime(draft, (0, 0))
    (folder / "notes").write_bytes(b"x" * 50_000)  # not ours
    for number in range(3, 6):
        cache.write(name(number), "x" * 3000)
    assert not draft.exists() and (folder / "notes").exists()
    assert cache.read(name(5)) is not None


def test_a_bound_that_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_BYTES", "0")
    assert cache.write(name(1), "content") != ""
    assert cache.write(name(1, "choice"), "content") == ""
    for bad in ("-1", "1 GB", "many"):
        monkeypatch.setenv("JAXMAGMA_CACHE_BYTES", bad)
        cache._complain_of.cache_clear()
        with pytest.warns(UserWarning, match="JAXMAGMA_CACHE_BYTES is no number of bytes"):
            assert cache.read(name(1, "choice")) is None


# ---- Never an error --------------------------------------------------------------------------


def test_folders_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for where in (tmp_path / "file", tmp_path / "file" / "cache", Path("/proc/nowhere")):
            monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(where))
            assert cache.write(name(1), "content") != ""
            assert cache.read(name(1)) is None
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_a_full_disk(folder: Path) -> None:
    """A draft that cannot be finished goes."""
    code = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"assert cache.write({name(1)!r}, b'x' * 5000) != ''\n"
        f"assert cache.read({name(1)!r}) is None\n"
        f"assert cache.write({name(2)!r}, b'x') == ''"
    )
    assert another_process(code).wait() == 0
    assert [x.name for x in folder.iterdir()] == [name(2)]


def test_readers_and_writers_of_one_entry(folder: Path) -> None:
    """A reader sees one content or another, and never a part of one."""
    contents = ["x" * 200_000, "y" * 300_000]
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(20):
            if number % 2:
                cache.write(name(1), contents[number // 2])
            else:
                found = cache.read(name(1))
                wrong.extend([] if found in (None, *contents) else [found])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache.read(name(1)) in contents
    assert [x.name for x in folder.iterdir()] == [name(1)]


def test_a_build_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", lambda: None)
    assert cache.write(name(1), "content") != ""
    assert cache.read(name(1)) is None and cache.path("x") is None
