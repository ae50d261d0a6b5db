"""The hooks of one schedule: installed is vocabulary, named is effect."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy
from packaging.utils import canonicalize_name

from slapo_core.errors import HookError, TraceError
from slapo_core.plugins.config import close_matches
from slapo_core.plugins.hook_rules import first_result_hooks, hook_violations, hooks_not_asked, specified_hooks
from slapo_core.plugins.loading import PluginWarning
from slapo_core.plugins.model import LOCAL_VERSION, core_label
from slapo_core.plugins.requirements import suggestions
from slapo_core.spec import hookspecs

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry

__all__ = ["HookManager"]

_MAY_RAISE: dict[str, tuple[type[Exception], ...]] = {"slapo_partition": (TraceError,)}
"""What a hook may raise by its specification: it arrives as it is, and is no fault of the plugin."""


class HookManager:
    """Calls the hooks of the distributions named in one schedule, and of no other.

    Args:
        registry: where the hooks modules are found.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._active: dict[str, str] = {}  # distribution -> label, whether or not it has hooks
        self._preferred: dict[str, str] = {}  # first-result hook -> distribution
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)

    @property
    def active(self) -> tuple[str, ...]:
        """The distributions named so far, sorted, whether or not they have hooks."""
        return tuple(sorted(self._active))

    def activate(self, distribution: str, *, version: str | None = None) -> None:
        """Name a distribution: its hooks are called from now on.

        Args:
            distribution: e.g. ``"slapo-tp"``; one that has no hooks is only remembered.
            version: what `Registry.provider` says besides the name; ``"local"`` stands for code of this process,
                which has no distribution and so no hooks, and is only remembered.

        Raises:
            PluginError: it is not installed, or not usable; the class says which.
            HookError: its hooks module is not as it must be.
        """
        if version == LOCAL_VERSION:
            self._active[distribution] = f"{distribution} {version}"
            return
        name = canonicalize_name(distribution)
        if name in self._active:
            return
        plugin = self._registry.plugin(name)
        if plugin is None:
            close = suggestions(name, self._registry.plugins)
            hint = f"did you mean {' or '.join(close)}?" if close else f"pip install {name}"
            raise HookError(f"cannot activate plugin '{distribution}': it is not installed", plugin=name, hint=hint)
        self._registry.require_usable_plugin(name)
        for entry in plugin.entries:
            if entry.kind == "hooks":
                self._register(name, plugin.label, self._registry.load(entry))
        self._active[name] = plugin.label

    def deactivate(self, distribution: str) -> None:
        """Take a distribution out again, one of `active`."""
        del self._active[distribution]
        self._preferred = {hook: chosen for hook, chosen in self._preferred.items() if chosen != distribution}
        if self._manager.has_plugin(distribution):
            self._manager.unregister(name=distribution)

    def prefer(self, hook: str, distribution: str) -> None:
        """Let one plugin's answer stand where several answer a first-result hook; it is active from now on.

        Args:
            hook: e.g. ``"slapo_liveness"``.
            distribution: e.g. ``"acme-slapo"``; the others are asked only where it has no answer.

        Raises:
            HookError: there is no such hook, it collects all answers, or the plugin does not implement it.
            PluginError: as `activate` raises.
        """
        self._require_hook(hook)
        name = canonicalize_name(distribution)
        if hook not in first_result_hooks():
            choices = ", ".join(sorted(first_result_hooks()))
            raise HookError(
                f"{hook} collects the answers of all plugins, so none of them is preferred (got {distribution!r})",
                hint=f"prefer is for the hooks with one answer: {choices}",
            )
        self.activate(name)
        if name not in self._modules(hook):
            others = sorted(self._modules(hook))
            raise HookError(
                f"{self._active[name]} has no {hook}, so its answer cannot be preferred",
                plugin=name,
                hint=_prefer_call(hook, others[0]) if others else f"leave {hook!r} out of prefer",
            )
        self._preferred[hook] = name

    def has(self, name: str, /) -> bool:
        """Whether an active plugin implements a hook."""
        self._require_hook(name)
        return bool(self._modules(name))

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Ask every active plugin.

        Args:
            name: the hook, e.g. ``"slapo_applied"``.
            arguments: exactly those of the hook's specification.

        Returns:
            for a first-result hook the one answer, or None; for any other hook the list of the answers that are not
            None.

        Raises:
            HookError: there is no such hook, an implementation raised, or two plugins answered a first-result hook and
                none of them is preferred.
        """
        if name in first_result_hooks():
            answer = self.single(name, **arguments)
            return answer[1] if answer is not None else None
        return [answer for _, answer in self.call_each(name, **arguments)]

    def single(self, name: str, /, **arguments: Any) -> tuple[str, Any] | None:
        """Ask a first-result hook.

        Returns:
            the plugin that answered, e.g. ``"slapo-tp 0.1.0"``, and its answer; None if none did.

        Raises:
            HookError: as for `call`.
        """
        self._require_hook(name)
        preferred = self._preferred.get(name)
        answers = self._answers(name, arguments, {preferred}) if preferred is not None else []
        answers = answers or self._answers(name, arguments, self._modules(name).keys() - {preferred})
        if len(answers) > 1:
            labels = [self._active[distribution] for distribution, _ in answers]
            raise HookError(
                f"hook {name}{_shown(arguments)} was answered by {' and by '.join(labels)}; one answer is allowed",
                plugin=labels[0],
                hint=f"{_prefer_call(name, answers[0][0])}, or name only one of them in this schedule",
            )
        return (self._active[answers[0][0]], answers[0][1]) if answers else None

    def call_each(self, name: str, /, **arguments: Any) -> list[tuple[str, Any]]:
        """Ask every active plugin; as `call`, but with the distribution of each answer that is not None."""
        return self._answers(name, arguments)

    def _answers(
        self, name: str, arguments: dict[str, Any], distributions: Collection[str] | None = None
    ) -> list[tuple[str, Any]]:
        known = self._require_hook(name)
        if set(known) != set(arguments):
            raise HookError(f"hook {name} takes ({', '.join(known)}), got ({', '.join(arguments)})")
        modules = self._modules(name)
        answers = []
        for distribution in sorted(modules if distributions is None else distributions):
            others = [module for other, module in modules.items() if other != distribution]
            caller = self._manager.subset_hook_caller(name, others)
            answers += [(distribution, answer) for answer in self._ask(caller, distribution, arguments)]
        return answers

    def _modules(self, name: str) -> dict[str, ModuleType]:
        """Who implements a hook: distribution -> hooks module."""
        hook: pluggy.HookCaller = getattr(self._manager.hook, name)
        modules: dict[str, Any] = {each.plugin_name: each.plugin for each in hook.get_hookimpls()}
        return modules

    def _require_hook(self, name: str) -> tuple[str, ...]:
        """The arguments of a hook.

        Raises:
            HookError: there is none of that name.
        """
        if name in hookspecs.NOT_ASKED:
            raise HookError(f"{core_label(self._registry.core_version)} does not ask hook '{name}' yet")
        known = specified_hooks().get(name)
        if known is None:
            close = close_matches(name, specified_hooks())
            raise HookError(f"there is no hook '{name}'", hint=f"did you mean '{close[0]}'?" if close else None)
        return known

    def _ask(self, caller: pluggy.HookCaller, distribution: str, arguments: dict[str, Any]) -> list[Any]:
        """The answers of one distribution, so that each of them, and each exception, has an owner."""
        label = self._active[distribution]
        try:
            given = caller(**arguments)
            if caller.name in first_result_hooks():
                given = [] if given is None else [given]
            answers = [list(answer) if isinstance(answer, Iterator) else answer for answer in given]
        except KeyboardInterrupt:
            raise
        except _MAY_RAISE.get(caller.name, ()):
            raise
        except BaseException as error:  # SystemExit of a plugin must not end the user's process
            message = f"hook {caller.name} of {label} raised {type(error).__name__}: {error}"
            self._trace(caller.name, arguments, label, f"raised {type(error).__name__}: {error}")
            if caller.name == "slapo_rolled_back":
                warnings.warn(f"{message}; the original error stands", PluginWarning, stacklevel=4)
                return []
            hint = f"report it to {distribution}, or SLAPO_DISABLE_PLUGINS={distribution}"
            raise HookError(message, plugin=label, hint=hint) from error
        self._trace(caller.name, arguments, label, ", ".join(map(_short, answers)) or "None")
        return answers

    def _trace(self, name: str, arguments: dict[str, Any], label: str, outcome: str) -> None:
        if self._registry.settings.trace:
            print(f"slapo: hook {name}{_shown(arguments)} -> {label}: {outcome}", file=sys.stderr)

    def _register(self, name: str, label: str, module: ModuleType) -> None:
        violations = hook_violations(module)
        if violations:
            message = f"the hooks of {label} ({module.__name__}) are refused: {'; '.join(violations)}"
            raise HookError(message, plugin=label)
        for unasked in hooks_not_asked(module):
            core = core_label(self._registry.core_version)
            warnings.warn(f"plugin {label} has '{unasked}', which {core} does not ask yet", PluginWarning, stacklevel=4)
        try:
            self._manager.register(module, name=name)
        except ValueError as error:  # another distribution has the same module
            raise HookError(f"the hooks of {label} ({module.__name__}) are refused: {error}", plugin=label) from error


def _prefer_call(hook: str, distribution: str) -> str:
    return f'create_schedule(..., prefer={{"{hook}": "{distribution}"}})'


def _shown(arguments: dict[str, Any]) -> str:
    return f"({', '.join(f'{name}={_short(value)}' for name, value in arguments.items())})"


def _short(value: Any) -> str:
    """A few words for a value: the path of a node, never the numbers of a tensor."""
    path = getattr(value, "path", None)
    if isinstance(path, str) and hasattr(value, "module"):
        return repr(path)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"tensor{tuple(value.shape)}"
    text = str(value) if path is not None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
