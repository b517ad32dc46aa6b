"""The whole state of a core as plain data, and a core from it: what lets a replay begin in the middle of a journal.

The objects that a core is made of are walked as they are, so no core has to say what its state is, and none can forget
a part of it. Restoring makes objects of this project's own classes and sets their attributes; it calls none of their
code. What cannot be written down but hangs on the core by attributes alone (a function it was built with, say) is
taken from a core that was newly built in the same way. A class may name attributes in `LEFT_OUT` that are not part of
its state: they are as the class itself has them then.
"""

import importlib
import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np

from bus.core import Core
from bus.journal.records import ENCODER

PACKAGES = ("bus", "executor", "frontend", "ranks")
"""Whose classes a state may have."""

SMALL_ARRAY = 4096
"""Elements up to which an array is written as it is; of wider tables the columns at the end that are zero are not."""


class StateError(Exception):
    """A state that cannot be written down, or read; the text names where it is."""


def capture(core: Core) -> bytes:
    """All there is of a core.

    Raises:
        StateError: something in it is neither data nor to be had from a new core.
    """
    writer = _Writer()
    root = writer.value(core, ("",))
    return ENCODER.encode((root, writer.nodes))


def restore(data: bytes, new: Core) -> Core:
    """A core in the state that was captured; `new` was built like the captured one, and is not changed.

    Raises:
        StateError: the state is of other code than this.
    """
    root, nodes = msgspec.msgpack.decode(data)
    try:
        core = _Reader(nodes, new).value(root)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state is not one of this code: {error}") from None
    assert isinstance(core, type(new))
    return core


Path = tuple[str, ...]


class _Writer:
    """Numbers everything that can be shared or changed, and writes each down once."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # a number stands for one object as long as that lives

    def value(self, value: Any, path: Path | None) -> Any:
        """A scalar as it is, anything else as a list with its number. `path` is how attributes alone lead there."""
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int and -(2**63) <= value < 2**64:
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = len(self.nodes)
            self._numbers[id(value)] = number
            self._alive.append(value)
            self.nodes.append(None)
            self.nodes[number] = self._node(value, path)
        return [number]

    def _node(self, value: Any, path: Path | None) -> list[Any]:
        kind = type(value)
        if kind in _CONTAINERS:
            return [kind.__name__, self._all(value)]
        if kind in (set, frozenset):
            return [kind.__name__, self._all(sorted(value))]  # in an order of their own they would be another state
        if kind is dict:
            return ["dict", self._all(itertools.chain.from_iterable(value.items()))]
        if kind is defaultdict:
            factory = self.value(value.default_factory, None)
            return ["defaultdict", factory, self._all(itertools.chain.from_iterable(value.items()))]
        if kind is int:
            return ["int", str(value)]
        if kind in (bytearray, memoryview):
            return [kind.__name__, bytes(value)]
        if isinstance(value, np.ndarray):
            return _array(value)
        if isinstance(value, np.generic):
            return ["scalar", value.dtype.str, value.tobytes()]
        if kind is itertools.count:
            return ["count", list(value.__reduce__()[1])]
        if isinstance(value, type):
            return ["type", _name(value)]
        if kind is MethodType:
            return ["method", self.value(value.__self__, None), value.__name__]
        if kind is FunctionType and "<" not in value.__qualname__:
            return ["type", _name(value)]
        if kind.__module__.partition(".")[0] in PACKAGES:
            if isinstance(value, tuple):
                return ["named", _name(kind), self._all(value)]
            return ["object", _name(kind), self._attributes(value, path)]
        if path is not None:
            return ["given", list(path[1:])]
        raise StateError(f"a {kind.__module__}.{kind.__qualname__} cannot be written down")

    def _all(self, values: Iterable[Any]) -> list[Any]:
        return [self.value(value, None) for value in values]

    def _attributes(self, value: Any, path: Path | None) -> dict[str, Any]:
        found = {}
        defaults = _defaults(type(value))
        for name in _attribute_names(value):
            if hasattr(value, name) and getattr(value, name) is not defaults.get(name, defaults):
                below = None if path is None else (*path, name)
                try:
                    found[name] = self.value(getattr(value, name), below)
                except StateError as error:
                    raise StateError(f"{type(value).__name__}.{name}: {error}") from None
        return found


class _Reader:
    """Makes each numbered thing once."""

    def __init__(self, nodes: list[Any], new: Core) -> None:
        self._nodes = nodes
        self._new = new
        self._made: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return sys.intern(value) if type(value) is str else value  # as the words in the code are
        (number,) = value
        if number not in self._made:
            self._made[number] = self._make(number, *self._nodes[number])
        return self._made[number]

    def _make(self, number: int, kind: str, *parts: Any) -> Any:
        match kind:
            case "list" | "deque" | "dict" | "defaultdict":
                return self._container(number, kind, *parts)
            case "tuple" | "set" | "frozenset":
                return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.value, parts[0]))
            case "object":
                return self._object(number, *parts)
            case "named":
                return tuple.__new__(_found(parts[0]), map(self.value, parts[1]))
            case "method":
                return getattr(self.value(parts[0]), parts[1])
            case "given":
                given: Any = self._new
                for name in parts[0]:
                    given = getattr(given, name)
                return given
        return _SIMPLE[kind](*parts)

    def _container(self, number: int, kind: str, *parts: Any) -> Any:
        """What may contain itself is there before what is in it."""
        if kind in ("list", "deque"):
            made: Any = [] if kind == "list" else deque()
            self._made[number] = made
            made.extend(map(self.value, parts[0]))
            return made
        made = {} if kind == "dict" else defaultdict(self.value(parts[0]))
        self._made[number] = made
        values = iter(parts[-1])
        for key in values:
            made[self.value(key)] = self.value(next(values))
        return made

    def _object(self, number: int, name: str, attributes: dict[str, Any]) -> Any:
        kind = _found(name)
        if issubclass(kind, msgspec.Struct):
            return kind(**{key: self.value(value) for key, value in attributes.items()})
        made = object.__new__(kind)
        self._made[number] = made
        for key, value in attributes.items():
            object.__setattr__(made, key, self.value(value))
        return made


_CONTAINERS = (list, tuple, deque)


def _array(value: Any) -> list[Any]:
    shape = value.shape
    if value.ndim == 2 and value.size > SMALL_ARRAY:
        width = shape[1]
        while width and not value[:, width // 2 : width].any():
            width //= 2
        value = value[:, :width]
    return ["array", value.dtype.str, list(shape), list(value.shape), value.tobytes()]


def _made_array(dtype: str, shape: list[int], written: list[int], data: bytes) -> Any:
    value = np.frombuffer(data, dtype).reshape(written)
    if written == shape:
        return value.copy()
    whole = np.zeros(shape, dtype)
    whole[:, : written[1]] = value
    return whole


def _attribute_names(value: Any) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    classes = [vars(kind) for kind in type(value).__mro__]
    names = [name for kind in classes for name in kind.get("__slots__", ())]
    left_out = {name for kind in classes for name in kind.get("LEFT_OUT", ())}
    return [name for name in (*names, *getattr(value, "__dict__", ())) if name not in left_out]


def _defaults(kind: type) -> dict[str, Any]:
    """The defaults of a Struct's fields. msgspec leaves out of a message what *is* the default, not what equals it."""
    if not issubclass(kind, msgspec.Struct):
        return {}
    fields = msgspec.structs.fields(kind)
    return {field.name: field.default for field in fields if field.default is not msgspec.NODEFAULT}


def _name(value: type | FunctionType) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    if module.partition(".")[0] not in (*PACKAGES, "builtins"):
        raise ValueError(f"{name} is none of this project's classes")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    if module == "builtins" and not isinstance(value, type):
        raise ValueError(f"{name} is no class")
    return value


_SIMPLE: dict[str, Callable[..., Any]] = {
    "array": _made_array,
    "bytearray": bytearray,
    "count": lambda parts: itertools.count(*parts),
    "int": int,
    "memoryview": memoryview,
    "scalar": lambda dtype, data: np.frombuffer(data, dtype)[0],
    "type": _found,
}
