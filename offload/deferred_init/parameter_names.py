# SPDX-License-Identifier: Apache-2.0
"""Which module owns a deferred parameter, under which name, and how it looked when its recording ended.

Parameters are found again by identity: the owning module is held weakly, and a note counts only while that module
still holds that very Parameter. Nothing refers to the Parameter itself, weakly or not, because
`torch.utils.swap_tensors` refuses tensors which have weak references.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from offload.deferred_init.recording import Value, View


@dataclass(slots=True)
class Note:
    """What is known of one Parameter. `value` and `view` are None as long as it is not deferred."""

    module: weakref.ref[nn.Module]
    name: str  # within `module`
    fqn: str
    version: int
    value: Value | None = None
    view: View | None = None


class ParameterNotes:
    """Notes by Parameter. Thread-safety: locks itself; a note is changed only by the thread that records."""

    def __init__(self) -> None:
        self._notes: dict[int, Note] = {}
        self._lock = threading.Lock()

    def find(self, tensor: Tensor) -> Note | None:
        with self._lock:
            note = self._notes.get(id(tensor))
        return note if note is not None and _holds(note, tensor) else None

    def name(self, model: nn.Module) -> None:
        """Remember the fqns of the parameters of `model` on the meta device; the first one of a tied parameter."""
        for module_name, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    self._name(module, name, f"{module_name}.{name}" if module_name else name, parameter)

    def _name(self, module: nn.Module, name: str, fqn: str, parameter: nn.Parameter) -> None:
        known = self.find(parameter)
        if known is None:
            with self._lock:
                self._notes[id(parameter)] = Note(weakref.ref(module), name, fqn, parameter._version)
        elif known.module() is module and known.name == name:
            known.fqn = fqn

    def deferred(self) -> Iterator[tuple[nn.Parameter, Note]]:
        """The noted parameters which still are on the meta device."""
        with self._lock:
            notes = list(self._notes.values())
        for note in notes:
            module = note.module()
            parameter = None if module is None else module._parameters.get(note.name)
            if parameter is not None and parameter.is_meta:
                yield parameter, note

    def sweep(self) -> None:
        """Forget parameters which are gone or have become real."""
        alive = {id(parameter): note for parameter, note in self.deferred()}
        with self._lock:
            self._notes = alive


def _holds(note: Note, tensor: Tensor) -> bool:
    module = note.module()
    return module is not None and module._parameters.get(note.name) is tensor


class ModuleWatch:
    """The modules to which something was registered while it watched, in the watching thread."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[nn.Module]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.get_ident()

        def see(module: nn.Module, *_: object) -> None:
            if threading.get_ident() == thread:
                self._seen[id(module)] = weakref.ref(module)

        with ExitStack() as stack:
            for register in (
                module_hooks.register_module_parameter_registration_hook,
                module_hooks.register_module_buffer_registration_hook,
                module_hooks.register_module_module_registration_hook,
            ):
                stack.callback(register(see).remove)
            yield

    def roots(self) -> list[nn.Module]:
        """The living modules seen which are part of no other."""
        modules = {id(module): module for module in (reference() for reference in self._seen.values()) if module}
        children = {id(child) for module in modules.values() for child in module.modules() if child is not module}
        return [module for key, module in modules.items() if key not in children]

    def modules(self) -> list[nn.Module]:
        """The living modules seen, and all modules below them, each once."""
        found = {id(module): module for root in self.roots() for module in root.modules()}
        return list(found.values())


def modules_under_construction() -> list[nn.Module]:
    """The modules whose `__init__` is running in this thread, the outermost first."""
    found: dict[int, nn.Module] = {}
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_name == "__init__" and isinstance(module := frame.f_locals.get("self"), nn.Module):
            found.setdefault(id(module), module)
    return list(found.values())[::-1]
