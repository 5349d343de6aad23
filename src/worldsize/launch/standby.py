"""Room: the inside of an interpreter that stands by: imports ahead, waits for its order, becomes that program.

The program finds what `python script.py` or `python -m module` would have given it: a `__main__` of its own, its
arguments, its search path, its traceback. No torch is named here: what to import ahead is the supervisor's to say.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import socket
import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from worldsize.launch import env

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType

READY = b"."


def main(channel: int, modules: Sequence[str], argv: list[str]) -> None:
    """Import `modules`, say so on the socket `channel`, wait there for an environment, be `argv` in it.

    Returns only where none came; else it ends as the program ends.
    """
    for name in modules:
        import_module(name)
    with socket.socket(fileno=channel) as line:
        line.send(READY)
        data = b"".join(iter(lambda: line.recv(1 << 16), b""))
    if data:
        env.become(json.loads(data))
        sys.orig_argv = argv
        _execute(argv[2:])


def _execute(words: list[str]) -> None:
    program, code = _module(words) if words[0] == "-m" else _script(words)
    sys.modules["__main__"] = program
    try:
        exec(code, program.__dict__)  # noqa: S102 - it is the program
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - ends as the interpreter would, without this file's frame
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _script(words: list[str]) -> tuple[ModuleType, CodeType]:
    sys.argv = words
    # Python joins the two and leaves "./" and "../" as they are.
    path = words[0] if words[0].startswith("/") else f"{Path.cwd()}/{words[0]}"
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    return _main(path, SourceFileLoader("__main__", path)), code


def _module(words: list[str]) -> tuple[ModuleType, CodeType]:
    spec = importlib.util.find_spec(words[1])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{words[1]}.__main__")
    loader = spec.loader if spec else None
    if spec is None or spec.origin is None or not isinstance(loader, SourceFileLoader):
        raise ImportError(f"No module named {words[1]}", name=words[1])
    code = loader.get_code(spec.name)
    assert code is not None
    sys.argv = [spec.origin, *words[2:]]
    program = _main(spec.origin, loader)
    program.__spec__, program.__package__ = spec, spec.parent
    program.__dict__["__cached__"] = spec.cached
    return program, code


def _main(path: str, loader: SourceFileLoader) -> ModuleType:
    program = ModuleType("__main__")
    names = {"__file__": path, "__loader__": loader, "__builtins__": builtins, "__cached__": None}
    program.__dict__.update(names, __annotations__={})
    return program
