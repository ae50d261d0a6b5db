"""Trace a module by ``torch.fx``: ``sch["encoder"].trace(tracer="fx")``."""

import inspect
import random

import torch
from torch import fx, nn

import slapo_core as slapo
from slapo_graph.protocol import Flag, Recorded, Untraceable

PLAIN = (bool, int, float, str, type(None), torch.dtype)


class FxTracer(slapo.Tracer):
    """Run the forward on proxies; all that is not computed of arguments must be a flag, or is refused."""

    name = "fx"

    def trace(self, module, forward, arguments, leaves):
        symbolic = _Symbolic(forward, arguments, leaves)
        before, drawn = _attributes(module), (random.getstate(), torch.get_rng_state())
        try:
            graph = symbolic.trace(module)
        except (fx.proxy.TraceError, TypeError) as error:
            raise Untraceable(f"cannot run on proxies: {error}") from error
        finally:
            changed = _restore(before)
        if changed:
            raise Untraceable(f"sets {changed}")
        if random.getstate() != drawn[0] or not torch.equal(torch.get_rng_state(), drawn[1]):
            raise Untraceable("draws random numbers that no argument goes into")
        return Recorded(graph, flags=tuple(_flags(module, leaves)))


class _Symbolic(fx.Tracer):
    def __init__(self, forward, arguments, leaves):
        super().__init__(param_shapes_constant=False)
        self.proxy_buffer_attributes = True
        self.forward, self.arguments, self.leaves = forward, arguments, leaves
        self.state = _state()

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in self.arguments}
        args, kwargs = [self.root], {}
        parameters = list(inspect.signature(self.forward).parameters.values())
        for parameter in (each for each in parameters[1:] if each.name in proxies):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise Untraceable("takes any number of arguments")
            value = self.arguments[parameter.name]
            is_settled = value is None or isinstance(value, (bool, str))  # another value has another graph
            given = value if is_settled else proxies[parameter.name]
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(given)
            else:
                kwargs[parameter.name] = given
        return (lambda *given: self.forward(*given, **kwargs)), args

    def is_leaf_module(self, module, path):
        return self.leaves(module, path)

    def call_module(self, module, forward, args, kwargs):
        overridden = next(cls for cls in type(module).__mro__ if "__call__" in vars(cls)) is not nn.Module
        if overridden and self.leaves(module, self.path_of_module(module)):
            raise Untraceable(f"calls a {type(module).__name__}, whose class overrides __call__")
        return super().call_module(module, forward, args, kwargs)

    def create_node(self, *args, **kwargs):
        if _state() != self.state:
            raise Untraceable("switches gradients or autocast")
        return super().create_node(*args, **kwargs)

    def create_arg(self, value):
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            raise Untraceable("uses a tensor that is neither an argument, a parameter nor a buffer")
        return super().create_arg(value)


def _state():
    kinds = ("cpu", "cuda")
    return torch.is_grad_enabled(), [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    ]


def _attributes(module):
    return [(below, dict(vars(below))) for below in module.modules()]


def _restore(before):
    """Restore attributes; return the name of one that was set."""
    changed = None
    for module, own in before:
        now = vars(module)
        for name in [each for each in {**now, **own} if now.get(each, before) is not own.get(each, before)]:
            changed = f"{type(module).__name__}.{name}"
            now.pop(name, None)
            now.update({name: own[name]} if name in own else {})
    return changed


def _flags(module, leaves):
    """Every plain attribute of the modules whose code is in the graph, and of objects that they hold."""
    for path, below in module.named_modules():
        if path and leaves(below, path):
            continue
        where = tuple(path.split(".")) if path else ()
        for name, value in vars(below).items():
            if name.startswith("_") or name == "training":
                continue
            if isinstance(value, PLAIN):
                yield Flag(where, name, value)
            elif not isinstance(value, (torch.Tensor, nn.Module, type)) and hasattr(value, "__dict__"):
                for own, part in vars(value).items():
                    if isinstance(part, PLAIN):
                        yield Flag((*where, name), own, part)
            elif isinstance(value, (tuple, list, dict)) and all(isinstance(part, PLAIN) for part in value):
                yield Flag(where, name, value if isinstance(value, tuple) else type(value)(value))
