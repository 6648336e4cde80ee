"""Modules that store the arguments of their constructor."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import nn
from typing_extensions import dataclass_transform


@dataclass_transform()
class WithOptions(nn.Module):
    """A subclass lists its constructor's arguments as a dataclass does, ``name: type = default``,
    and ``_: KW_ONLY`` before those that have no position. Each becomes an attribute, which may be
    changed until it is used.

    Names in ``buffers_of`` become buffers, which move with the module and are not part of its
    state.
    """

    buffers_of: ClassVar[tuple[str, ...]] = ()
    fields: ClassVar[dict[str, inspect.Parameter]] = {}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            return
        parameters = dict(cls.fields)
        kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for name, annotation in inspect.get_annotations(cls).items():
            if annotation == "KW_ONLY":  # a name, as annotations are not evaluated
                kind = inspect.Parameter.KEYWORD_ONLY
            else:
                parameters[name] = inspect.Parameter(name, kind, default=vars(cls)[name], annotation=annotation)
                delattr(cls, name)  # a buffer may not have the name of a class's attribute
        cls.fields = parameters
        signature = inspect.Signature(list(parameters.values()))

        def init(self: WithOptions, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            self._set(given.arguments)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(init).update(__signature__=signature.replace(parameters=[own, *parameters.values()]))
        setattr(cls, "__init__", init)  # noqa: B010  a type checker knows the fields, not this

    def _set(self, options: dict[str, Any]) -> None:
        super().__init__()
        for name, value in options.items():
            if name in self.buffers_of:
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise ``ValueError`` for an option that is wrong."""

    def options(self) -> dict[str, Any]:
        """The arguments that a loss function takes under the same names, without those that have
        no effect."""
        return {name: getattr(self, name) for name in self.fields if name not in ("compiled", "chunk_size")}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields if name not in self.buffers_of)
