"""The hooks of one schedule: installed is vocabulary, named is effect."""

from __future__ import annotations

import inspect
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slapo_core.errors import HookError
from slapo_core.plugins.config import close_matches
from slapo_core.plugins.loading import PluginWarning
from slapo_core.plugins.model import LOCAL_VERSION
from slapo_core.plugins.requirements import raise_for_state
from slapo_core.spec.hookspecs import FIRST_RESULT, HOOKS, PREFIX, PROJECT
from slapo_core.spec.reserved import canonical_distribution

if TYPE_CHECKING:
    import pluggy

    from slapo_core.plugins.registry import Registry

__all__ = ["HookManager", "hook_breaches"]


class HookManager:
    """Calls the hooks of the distributions named in one schedule, and of no other.

    Args:
        registry: where the hooks modules are found.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._trace = registry.settings.trace
        self._active: dict[str, str] = {}  # distribution -> label, in the order of activation
        self._modules: dict[str, ModuleType] = {}
        self._manager: pluggy.PluginManager | None = None
        self._callers: dict[tuple[str, str], pluggy.HookCaller] = {}

    @property
    def active(self) -> tuple[str, ...]:
        """The distributions named so far, sorted, whether or not they have hooks."""
        return tuple(sorted(self._active))

    def activate(self, distribution: str, *, version: str | None = None) -> bool:
        """Name a distribution: its hooks are called from now on.

        Args:
            distribution: e.g. ``"slapo-tp"``; one that has no hooks is only remembered.
            version: what `Registry.provider` says besides the name; ``"local"`` stands for code of this process,
                which has no distribution and so no hooks, and is only remembered.

        Returns:
            whether it was not active before.

        Raises:
            PluginError: it is not installed, or not usable; the class says which.
            HookError: its hooks module is not as it must be.
        """
        if version == LOCAL_VERSION:
            known = distribution in self._active
            self._active[distribution] = f"{distribution} {version}"
            return not known
        name = canonical_distribution(distribution)
        plugin = self._registry.plugin(distribution) or self._registry.plugin(name)
        if plugin is None:
            installed = [item.name for item in self._registry.plugins]
            owners = [
                item.name for item in self._registry.plugins if name in {entry.namespace for entry in item.entries}
            ]
            close = owners or close_matches(name, installed)
            hint = f"did you mean {' or '.join(close)}?" if close else f"pip install {name}"
            raise HookError(f"cannot activate plugin '{distribution}': it is not installed", plugin=name, hint=hint)
        if plugin.name in self._active:
            return False
        if plugin.state in ("disabled", "incompatible") or (not plugin.usable and not plugin.entries):
            raise_for_state(plugin, f"plugin {plugin.label}")
        entries = [entry for entry in plugin.entries if entry.kind == "hooks"]
        if entries:
            module = self._registry.load(entries[0])
            self._register(plugin.name, plugin.label, module)
        self._active[plugin.name] = plugin.label
        return True

    def deactivate(self, distribution: str) -> bool:
        """Take a distribution's hooks out again.

        Returns:
            whether it was active.
        """
        name = distribution if distribution in self._active else canonical_distribution(distribution)
        if name not in self._active:
            return False
        del self._active[name]
        if self._modules.pop(name, None) is not None:
            assert self._manager is not None
            self._manager.unregister(name=name)
            self._callers.clear()
        return True

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Ask every active plugin.

        Args:
            name: the hook, e.g. ``"slapo_applied"``.
            arguments: exactly those of the hook's specification.

        Returns:
            for a first-result hook the one answer that is not None, else None; for any other hook the list of the
            answers that are not None.

        Raises:
            HookError: there is no such hook, an implementation raised, or two plugins answered a first-result hook.
        """
        if name in FIRST_RESULT:
            answer = self.single(name, **arguments)
            return answer[1] if answer is not None else None
        return [answer for _, answer in self.call_each(name, **arguments)]

    def single(self, name: str, /, **arguments: Any) -> tuple[str, Any] | None:
        """Ask every active plugin something that one of them may answer.

        Returns:
            the plugin that answered, e.g. ``"slapo-tp 0.1.0"``, and its answer; None if none did.

        Raises:
            HookError: as for `call`; also when two plugins answered, whatever the hook.
        """
        answers = self.call_each(name, **arguments)
        if len({distribution for distribution, _ in answers}) > 1:
            labels = [self._active[distribution] for distribution, _ in answers]
            raise HookError(
                f"hook {name}{_shown(arguments)} was answered by {' and by '.join(labels)}; one answer is allowed",
                plugin=labels[0],
                hint=f"name only one of them in this schedule, or SLAPO_DISABLE_PLUGINS={answers[-1][0]}",
            )
        return (self._active[answers[0][0]], answers[0][1]) if answers else None

    def call_each(self, name: str, /, **arguments: Any) -> list[tuple[str, Any]]:
        """Ask every active plugin; as `call`, but with the distribution of each answer that is not None."""
        if not self._modules and name in HOOKS:
            return []
        _check_call(name, arguments)
        answers = []
        for distribution in sorted(self._modules):
            caller = self._caller(name, distribution)
            if caller.get_hookimpls():
                answers += [(distribution, answer) for answer in self._ask(caller, name, distribution, arguments)]
        return answers

    def _ask(self, caller: pluggy.HookCaller, name: str, distribution: str, arguments: dict[str, Any]) -> list[Any]:
        label = self._active[distribution]
        try:
            answers = [list(answer) if inspect.isgenerator(answer) else answer for answer in caller(**arguments)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit of a plugin must not end the user's process
            message = f"hook {name} of {label} raised {type(error).__name__}: {error}"
            self._tell(f"{name}{_shown(arguments)} -> {label}: raised {type(error).__name__}: {error}")
            if name == "slapo_rolled_back":
                warnings.warn(f"{message}; the original error stands", PluginWarning, stacklevel=4)
                return []
            hint = f"report it to {distribution}, or SLAPO_DISABLE_PLUGINS={distribution}"
            raise HookError(message, plugin=label, hint=hint) from error
        self._tell(f"{name}{_shown(arguments)} -> {label}: {', '.join(map(_short, answers)) or None}")
        return answers

    def _tell(self, line: str) -> None:
        if self._trace:
            print(f"slapo: hook {line}", file=sys.stderr)

    def _register(self, name: str, label: str, module: ModuleType) -> None:
        breaches = hook_breaches(module)
        if breaches:
            raise HookError(
                f"the hooks of {label} ({module.__name__}) are refused: {'; '.join(breaches)}", plugin=label
            )
        if self._manager is None:
            self._manager = _new_manager()
        self._manager.register(module, name=name)
        self._modules[name] = module
        self._callers.clear()

    def _caller(self, name: str, distribution: str) -> pluggy.HookCaller:
        """The hook restricted to one distribution, so that answers and exceptions have an owner."""
        key = (name, distribution)
        if key not in self._callers:
            assert self._manager is not None
            others = [module for other, module in self._modules.items() if other != distribution]
            self._callers[key] = self._manager.subset_hook_caller(name, others)
        return self._callers[key]


def hook_breaches(module: ModuleType) -> list[str]:
    """Every rule that a hooks module breaks, in words: misspelt names, missing decorators, wrong arguments.

    Args:
        module: the hooks module of a distribution.
    """
    breaches = []
    for name, value in sorted(vars(module).items()):
        options = getattr(value, f"{PROJECT}_impl", None)
        if isinstance(value, (type, ModuleType)) or not callable(value):
            continue
        if options is None and not name.startswith(PREFIX):
            continue
        breach = _implementation_breach(name, value, options)
        if breach is not None:
            breaches.append(breach)
    return breaches


def _implementation_breach(name: str, function: Any, options: Any) -> str | None:
    name = (options or {}).get("specname") or name
    if name not in HOOKS:
        close = close_matches(name, HOOKS)
        return f"there is no hook '{name}'" + (f"; did you mean '{close[0]}'?" if close else "")
    if options is None:
        return f"'{name}' is not decorated with @hookimpl"
    ordering = [key for key in ("hookwrapper", "wrapper", "tryfirst", "trylast") if options.get(key)]
    if ordering:
        return f"'{name}' uses @hookimpl({ordering[0]}=True); the order of calls has no meaning here"
    known, wanted = list(inspect.signature(HOOKS[name]).parameters), inspect.signature(function).parameters
    wrong = [argument for argument in wanted if argument not in known]
    if wrong:
        close = close_matches(wrong[0], known)
        meant = f"; did you mean '{close[0]}'?" if close else ""
        return f"'{name}' takes '{wrong[0]}', but the arguments of this hook are ({', '.join(known)}){meant}"
    return None


def _new_manager() -> pluggy.PluginManager:
    import pluggy

    from slapo_core.spec import hookspecs

    marker = pluggy.HookspecMarker(PROJECT)
    for function in HOOKS.values():
        marker(function)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _check_call(name: str, arguments: dict[str, Any]) -> None:
    if name not in HOOKS:
        close = close_matches(name, HOOKS)
        raise HookError(f"there is no hook '{name}'", hint=f"did you mean '{close[0]}'?" if close else None)
    known = set(inspect.signature(HOOKS[name]).parameters)
    if known != set(arguments):
        raise HookError(f"hook {name} takes ({', '.join(sorted(known))}), got ({', '.join(sorted(arguments))})")


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
