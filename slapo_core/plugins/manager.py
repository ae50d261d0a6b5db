"""The hooks of one schedule: installed is vocabulary, named is effect."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy
from packaging.utils import canonicalize_name

from slapo_core import hookspecs
from slapo_core.errors import HookError
from slapo_core.plugins.metadata import DISABLE, LOCAL_VERSION

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry


_Item = TypeVar("_Item")


class HookManager:
    """Calls the hooks of the distributions that one schedule names.

    Args:
        registry: where the hooks modules are found.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._active: dict[str, str] = {}  # distribution -> label, whether or not it has hooks
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        for _ in registry.each("hookspecs", self._manager.add_hookspecs):
            pass

    @property
    def active(self) -> tuple[str, ...]:
        """The named distributions, sorted, with or without hooks."""
        return tuple(sorted(self._active))

    def activate(self, distribution: str, *, version: str | None = None) -> None:
        """Name a distribution: its hooks are called from now on.

        Args:
            distribution: e.g. ``"acme-slapo"``; one that has no hooks is only remembered.
            version: of `Registry.provider`; ``"local"`` for code of this process,
                which has no distribution and so no hooks, and is only remembered.

        Raises:
            PluginError: it is not installed, or not usable.
            HookError: one of its hooks modules has an undecorated or unknown hook.
        """
        if version == LOCAL_VERSION:
            self._active[distribution] = f"{distribution} {version}"
            return
        name = canonicalize_name(distribution)
        if name in self._active:
            return
        plugin = self._registry.usable_plugin(name)
        entries = [entry for entry in plugin.entries if entry.kind == "hooks"]
        modules = {f"{name}:{entry.name}": self._registry.load(entry) for entry in entries}
        try:
            for key, module in modules.items():
                self._register(key, plugin.label, module)
        except HookError:
            self._unregister(name)
            raise
        self._active[name] = plugin.label

    def deactivate(self, distribution: str) -> None:
        """Remove a distribution from `active`: its hooks are not called any more."""
        del self._active[distribution]
        self._unregister(distribution)

    def has(self, name: str, /) -> bool:
        """Whether an active plugin implements a hook."""
        return bool(self._implementations(name))

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Return the answer of `single` for a first-result hook, else all answers of `call_each`."""
        specification = getattr(self._manager.hook, name).spec
        if specification.opts["firstresult"]:
            answer = self.single(name, **arguments)
            return None if answer is None else answer[1]
        return [answer for _, answer in self.call_each(name, **arguments)]

    def single(self, name: str, /, **arguments: Any) -> tuple[str, Any] | None:
        """Ask a first-result hook; functions with ``@hookimpl(trylast=True)`` if no other answers.

        Args:
            name: the hook, e.g. ``"slapo_liveness"``.
            arguments: of the hook's specification.

        Returns:
            the plugin that answered, e.g. ``"acme-slapo 1.0"``, and its answer; None if none did.

        Raises:
            HookError: an implementation raised, or two plugins answered.
        """
        for is_default in (False, True):
            chosen = [each for each in self._implementations(name) if each.trylast == is_default]
            answers = self._ask(name, chosen, arguments)
            if len(answers) > 1:
                shown = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in arguments.items())
                labels = [self._label(key) for key, _ in answers]
                last = answers[-1][0]
                raise HookError(
                    f"hook {name}({shown}) was answered by {' and by '.join(labels)}; one answer is allowed",
                    plugin=labels[0],
                    hint="name only one of them in this schedule: neither list the other in "
                    f"create_schedule(plugins=...) nor apply a primitive of it, or {DISABLE}={last}",
                )
            if answers:
                return self._label(answers[0][0]), answers[0][1]
        return None

    def call_each(self, name: str, /, **arguments: Any) -> list[tuple[str, Any]]:
        """Ask every active plugin.

        Returns:
            each distribution, sorted, with its answer, if that is not None.

        Raises:
            HookError: an implementation raised.
        """
        answers = self._ask(name, self._implementations(name), arguments)
        return [(key.partition(":")[0], answer) for key, answer in answers]

    def collect(
        self, name: str, kinds: tuple[type[_Item], ...], hint: str, /, **arguments: Any
    ) -> list[tuple[str, _Item]]:
        """Ask every active plugin for objects of some classes: one, or an iterable of them.

        Args:
            name: the hook, e.g. ``"slapo_check"``.
            kinds: the classes, e.g. ``(Violation,)``.
            hint: for an author whose hook answers with something else: a right ``yield``.
            arguments: of the hook's specification.

        Returns:
            each distribution, sorted, with every object that it gave.

        Raises:
            HookError: an implementation raised, or gave something else.
        """
        found: list[tuple[str, _Item]] = []
        for distribution, answer in self.call_each(name, **arguments):
            several = isinstance(answer, Iterable) and not isinstance(answer, (str, Mapping))
            for item in answer if several else (answer,):
                if not isinstance(item, kinds):
                    wanted = " and ".join(kind.__name__ for kind in kinds)
                    raise HookError(
                        f"hook {name} of {distribution} must yield {wanted} objects (got {item!r})",
                        plugin=distribution,
                        hint=hint,
                    )
                found.append((distribution, item))
        return found

    def _implementations(self, name: str) -> list[pluggy.HookImpl]:
        hook: pluggy.HookCaller | None = getattr(self._manager.hook, name, None)
        found = [] if hook is None else hook.get_hookimpls()  # None: the distribution that specifies it is disabled
        return sorted(found, key=lambda each: each.plugin_name)

    def _ask(self, name: str, chosen: list[pluggy.HookImpl], arguments: dict[str, Any]) -> list[tuple[str, Any]]:
        """Call one function after the other, so that each answer and exception has an owner, its hooks module."""
        answers = []
        for each in chosen:
            may_raise = getattr(getattr(self._manager.hook, name).spec.function, "slapo_may_raise", KeyboardInterrupt)
            values, label = [arguments[argument] for argument in each.argnames], self._label(each.plugin_name)
            try:
                answer = each.function(*values)
                answer = list(answer) if isinstance(answer, Iterator) else answer
            except (KeyboardInterrupt, may_raise):
                raise
            except BaseException as error:  # SystemExit of a plugin must not end the user's process
                raise HookError(
                    f"hook {name} of {label} raised {type(error).__name__}: {error}",
                    plugin=label,
                    hint=f"report it to {label.partition(' ')[0]}, or {DISABLE}={each.plugin_name}",
                ) from error
            if answer is not None:
                answers.append((each.plugin_name, answer))
        return answers

    def _label(self, key: str) -> str:
        """The distribution with its version, of ``<distribution>:<hooks module>``."""
        return self._active[key.partition(":")[0]]

    def _unregister(self, distribution: str) -> None:
        for key, _ in self._manager.list_name_plugin():
            if key.partition(":")[0] == distribution:
                self._manager.unregister(name=key)

    def _register(self, key: str, label: str, module: ModuleType) -> None:
        refused = f"the hooks of {label} ({module.__name__}) are refused"
        for hook, function in inspect.getmembers(module, inspect.isfunction):
            options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
            if options is None and hasattr(self._manager.hook, hook):
                raise HookError(f"{refused}: '{hook}' is not decorated with @hookimpl", plugin=label)
            if options is not None and (options["wrapper"] or options["hookwrapper"]):
                raise HookError(f"{refused}: '{hook}' is a wrapper; write a function that answers", plugin=label)
        try:
            self._manager.register(module, name=key)
            self._manager.check_pending()
        except (ValueError, pluggy.PluginValidationError) as error:  # registered twice; an unknown hook or argument
            raise HookError(f"{refused}: {error}", plugin=label) from error
