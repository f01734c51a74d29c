"""Run a `check` in this process and the code in another one, which cannot fake the verdict.

    python judge.py        reads {"code", "check"} from stdin, writes {"value": null} if it passes

Names that the check does not define are those of the code. The code's process receives calls and
returns values. Values of standard types are copied as JSON, so the code's classes cannot influence
how they compare. Other objects stay in their process, and a Remote represents them in the other.
A comparison of a Remote and a value uses a copy that the code makes without seeing that value.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import json
import operator
import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4  # linux/prctl.h
NUM_FILES = 256  # limit of open files, as in server.py
SCALARS = (type(None), bool, int, float, str)
SEQUENCES = {t.__name__: t for t in (list, tuple, set, frozenset, deque)}
MAPPINGS = {t.__name__: t for t in (dict, Counter, OrderedDict)}
TEXTS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "Fraction": (str, Fraction),
    "Decimal": (str, Decimal),
    "complex": (str, complex),
    "date": (date.isoformat, date.fromisoformat),
    "datetime": (datetime.isoformat, datetime.fromisoformat),
    "bytes": (bytes.hex, bytes.fromhex),
    "bytearray": (bytearray.hex, bytearray.fromhex),
    "timedelta": (lambda t: str(t // timedelta(microseconds=1)), lambda t: timedelta(0, 0, int(t))),
}
# No `contains`, because the code would see the item. Python compares with each element instead.
UNARY = "len iter next getitem setitem delitem bool hash str repr".split()
BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
STANDARD_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
COMPARISONS = "eq ne lt le gt ge".split()


class Remote:
    """An object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        # _saw_value: it depends on a value of the check, so it may not be compared with values.
        self.__dict__.update(_peer=peer, _number=number, _saw_value=False)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.call(self, arguments, named)

    def __instancecheck__(self, value: Any) -> bool:
        return self._peer.ask("isinstance", value, self) is True


def asks(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._peer.ask(operation, self, *arguments)


def operates(name: str, swapped: bool = False) -> Callable[[Remote, Any], Any]:
    """Return the method of an operator. The code does not see what its objects are compared to."""
    operation = getattr(operator, name)

    def method(remote: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return remote._peer.ask(name, remote, other)
        value = remote if remote._saw_value else remote._peer.ask("plain", remote)
        if not isinstance(value, Remote):
            return operation(other, value) if swapped else operation(value, other)
        if name in COMPARISONS:
            return NotImplemented
        result = remote._peer.ask(name, *((other, remote) if swapped else (remote, other)))
        if not isinstance(result, Remote):
            return NotImplemented
        result.__dict__["_saw_value"] = True
        return result

    return method


for name in UNARY:
    setattr(Remote, f"__{name}__", asks(name))
for name in (*COMPARISONS, *BINARY):
    setattr(Remote, f"__{name.strip('_')}__", operates(name))
for name in BINARY:
    setattr(Remote, f"__r{name.strip('_')}__", operates(name, swapped=True))
OPERATIONS: dict[str, Callable[..., Any]] = {
    name: getattr(builtins, name, None) or getattr(operator, name)
    for name in (*UNARY, *COMPARISONS, *BINARY, "getattr", "setattr", "isinstance")
}


def plain(value: Any) -> Any:
    """Return an instance of a subclass as an instance of the standard class, if it is one."""
    kinds: tuple[Any, ...] = (int, float, str, list, tuple, dict, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    return value


class Peer:
    """One side of the two processes. Messages are lines of JSON; each request has a reply."""

    def __init__(
        self,
        reader: Any,
        writer: Any,
        operations: dict[str, Callable[..., Any]],
        pid: int = 0,
    ) -> None:
        self.reader, self.writer, self.operations = reader, writer, operations
        self.pid = pid  # the other process, if it is a child
        self.objects: list[Any] = []
        self.errors: dict[str, type] = {}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        name = kind.__name__
        if SEQUENCES.get(name) is kind:
            return [name, *map(self.encode, value)]
        if MAPPINGS.get(name) is kind:
            return [name, *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if name in TEXTS and kind.__module__ in sys.stdlib_module_names:
            return [name, TEXTS[name][0](value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            is_standard = STANDARD_ERRORS.get(value.__name__) is value
            return [
                "error",
                value.__name__,
                *([] if is_standard else [self.encode(value.__base__)]),
            ]
        if isinstance(value, Remote):
            return ["yours", value._number]
        self.objects.append(value)
        return ["mine", len(self.objects) - 1]

    def decode(self, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        name, *items = content
        if name in SEQUENCES:
            return SEQUENCES[name](map(self.decode, items))
        if name in MAPPINGS:
            return MAPPINGS[name]({self.decode(k): self.decode(v) for k, v in items})
        if name in TEXTS:
            return TEXTS[name][1](items[0])
        if name == "error":
            name, *bases = items
            if not bases:
                return STANDARD_ERRORS[name]
            return self.errors.setdefault(name, type(name, (self.decode(bases[0]),), {}))
        return Remote(self, items[0]) if name == "mine" else self.objects[items[0]]

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Return the other process's result of an operation, or raise its exception."""
        self.send(["ask", operation, *map(self.encode, arguments)])
        kind, *content = self.serve()
        if kind == "raise":
            error, arguments = map(self.decode, content)
            raise error(*arguments)
        return self.decode(content[0])

    def call(self, function: Remote, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the other process's function, and change the arguments that it changes."""
        value, changed = self.ask("call", function, arguments, named)
        for old, new in zip(arguments, changed, strict=False):
            if isinstance(old, (list, bytearray)) and type(new) is type(old):
                old[:] = new
            elif isinstance(old, (dict, set)) and type(new) is type(old):
                old.clear()
                old.update(new)
        return value

    def serve(self) -> list[Any]:
        """Answer requests until a reply comes, and return it."""
        for line in iter(self.reader.readline, ""):
            kind, *content = json.loads(line)
            if kind != "ask":
                return [kind, *content]
            operation, *arguments = content
            try:
                result = self.operations[operation](*map(self.decode, arguments))
                reply = ["value", self.encode(result)]
            except BaseException as error:
                texts = [a if type(a) in SCALARS else repr(a) for a in error.args]
                reply = ["raise", self.encode(type(error)), self.encode(texts)]
            self.send(reply)
        self.end()

    def send(self, message: Any) -> None:
        try:
            self.writer.write(json.dumps(message) + "\n")
            self.writer.flush()
        except BrokenPipeError:
            self.end()

    def end(self) -> NoReturn:
        """End like the other process. An exception would not do, as a check could catch it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) if self.pid else 0
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(1)


def call(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return function(*arguments, **named), arguments


def run_code() -> NoReturn:
    """Run the code, and answer the check's requests."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    space: dict[str, Any] = {"__name__": "program"}
    code = json.loads(requests.readline())
    exec(compile(code, "program.py", "exec", dont_inherit=True), space)
    operations = OPERATIONS | {"call": call, "plain": plain, "name": space.__getitem__}
    peer = Peer(requests, replies, operations | {"names": lambda: list(space)})
    peer.serve()
    peer.end()


def main() -> None:
    sys.set_int_max_str_digits(0)  # values are decimal text on the way
    requests, replies = os.pipe(), os.pipe()
    pid = os.fork()  # before this process reads the check
    if pid == 0:
        os.dup2(requests[0], 0)
        os.dup2(replies[1], 1)
        os.closerange(3, NUM_FILES)
        run_code()
    os.close(requests[0])
    os.close(replies[1])
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the code cannot trace this process
    job = json.load(sys.stdin)
    peer = Peer(os.fdopen(replies[0]), os.fdopen(requests[1], "w"), {"call": call}, pid)
    peer.send(job["code"])
    check = ast.parse(job["check"], "check.py")
    used = {node.id for node in ast.walk(check) if isinstance(node, ast.Name)}
    names = used.intersection(peer.ask("names")) - {"__name__", "__builtins__"}
    # The code may define `sum` if the check tests nothing else. It may not replace `abs`.
    names = {name for name in names if not hasattr(builtins, name)} or names
    space = {name: peer.ask("name", name) for name in names} | {"__name__": "check"}
    for node in ast.walk(check):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in sys.stdlib_module_names:  # not that of the code, which may be another
                space[name] = importlib.import_module(name)
    exec(compile(check, "check.py", "exec", dont_inherit=True), space)
    print(json.dumps({"value": None}))


if __name__ == "__main__":
    main()
