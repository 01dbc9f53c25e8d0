"""Names for what users pick and other packages add: policies, reclaimers, attention and cost models, generators."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from sim.errors import InputError, did_you_mean

__all__ = ["Registry", "parse_spec"]

T = TypeVar("T")


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``"name:key=value,key=value"`` into the name and its parameters.

    Raises
    ------
    InputError
        If a parameter is not of the form ``key=value`` or is given twice.
    """
    name, _, rest = spec.partition(":")
    parameters: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise InputError(f"{spec!r}: expected name:key=value,key=value, got {item!r}")
        if key in parameters:
            raise InputError(f"{spec!r}: parameter {key!r} is given twice")
        parameters[key] = value
    return name.strip(), parameters


def _convert(text: str, annotation: Any, where: str) -> Any:
    """Read ``text`` as the type a dataclass field is annotated with."""
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        if text not in options:
            raise InputError(
                f"{where}: expected one of {', '.join(options)}, got {text!r}{did_you_mean(text, options)}"
            )
        return text
    if isinstance(annotation, types.UnionType):
        kinds = [option for option in options if option is not type(None)]
        if text.lower() == "none" and len(kinds) < len(options):
            return None
        annotation = kinds[0]
    try:
        if annotation is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        value = annotation(text)
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{where}: expected {getattr(annotation, '__name__', annotation)}, got {text!r}") from None
    if isinstance(value, float) and value != value:
        raise InputError(f"{where}: expected a number, got {text!r}")
    return value


def _package(entry: importlib.metadata.EntryPoint) -> str:
    """Return the package that an entry point is from, with its version."""
    dist = getattr(entry, "dist", None)
    return f"package {dist.name} {dist.version}" if dist is not None else entry.value


class Registry(Generic[T]):
    """Frozen dataclasses by name; other packages add theirs through an entry-point group.

    Parameters
    ----------
    kind
        What the entries are, for error messages ("policy").
    group
        Entry-point group: each entry point loads a class as :meth:`register` would take it.
    modules
        Modules that register the built-in entries when imported; imported on first use.
    """

    def __init__(self, kind: str, group: str, modules: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.group = group
        self._modules = modules
        self._classes: dict[str, type[T]] = {}
        self._entries: dict[str, list[importlib.metadata.EntryPoint]] = {}
        self._loaded = False
        self._taken: set[str] = set()

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: make a frozen dataclass available under ``name``."""

        def add(cls: type[T]) -> type[T]:
            if name in self._classes and self._classes[name] is not cls:
                raise InputError(f"{self.kind} {name!r} is registered twice")
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return add

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for module in self._modules:
            importlib.import_module(module)
        for entry in importlib.metadata.entry_points(group=self.group):
            self._entries.setdefault(entry.name, []).append(entry)

    def names(self) -> list[str]:
        """Return the known names, sorted."""
        self._load()
        return sorted(self._classes.keys() | self._entries.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def get(self, name: str) -> type[T]:
        """Return the class registered under ``name``.

        Raises
        ------
        InputError
            If there is none (the message lists what there is), if it cannot be loaded, or if there are two.
        """
        self._load()
        for entry in self._entries.get(name, ()):
            # Only now: a broken package does not keep others from being used.
            self._take(name, entry)
        if name not in self._classes:
            known = self.names()
            hint = did_you_mean(name, known)
            raise InputError(f"unknown {self.kind} {name!r}: expected one of {', '.join(known)}{hint}")
        return self._classes[name]

    def _take(self, name: str, entry: importlib.metadata.EntryPoint) -> None:
        """Register what another package has under ``name``."""
        others = [_package(other) for other in self._entries[name] if other is not entry]
        if others or (name in self._classes and name not in self._taken):
            others = others or [self._home(self._classes[name]).replace("built in", "vtoken-sim itself")]
            raise InputError(
                f"{self.kind} {name!r} is there twice: in {_package(entry)} ({entry.value}) and in {others[0]}; "
                "uninstall one of them, or rename it"
            )
        if name in self._taken:
            return
        try:
            found = entry.load()
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"{self.kind} {name!r}: {_package(entry)} cannot be loaded ({entry.value}): {why}"
            ) from error
        if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
            raise InputError(
                f"{self.kind} {name!r}: {_package(entry)}: expected {entry.value} to be a dataclass, got {found!r}"
            )
        self.register(name)(found)  # type: ignore[arg-type]
        self._taken.add(name)

    def origin(self, name: str) -> str:
        """Return where ``name`` comes from: ``built in``, a package with its version, or the module it was made in."""
        self._load()
        if name in self._entries:
            return _package(self._entries[name][0])
        return self._home(self.get(name))

    def _home(self, cls: type[T]) -> str:
        top = cls.__module__.partition(".")[0]
        return "built in" if top == __name__.partition(".")[0] else cls.__module__

    def build(self, spec: str, **extra: Any) -> T:
        """Make the object that ``"name:key=value,..."`` describes.

        Parameters
        ----------
        spec
            Name and parameters; every parameter is a field of the dataclass.
        extra
            Values for fields that the caller knows, where the class has them and the specification does not set them.

        Raises
        ------
        InputError
            If the name or a parameter is unknown, a value cannot be read, or the class refuses it.
        """
        name, given = parse_spec(spec)
        cls = self.get(name)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {key: value for key, value in extra.items() if key in fields}
        for key, text in given.items():
            if key not in fields:
                known = ", ".join(fields) or "none"
                raise InputError(
                    f"{self.kind} {name!r} has no parameter {key!r}: it has {known}{did_you_mean(key, fields)}"
                )
            values[key] = _convert(text, hints[key], f"{self.kind} {name!r}, parameter {key!r}")
        missing = [
            key
            for key, field in fields.items()
            if key not in values
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise InputError(f"{self.kind} {name!r} needs {', '.join(missing)}: write {name}:{missing[0]}=...")
        try:
            return cls(**values)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"{self.kind} {name!r}: {error}") from None
