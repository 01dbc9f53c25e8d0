"""Refuse a sweep before it starts for what every one of its runs would be refused for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sim.errors import InputError
from sim.registry import parse_spec
from sim.study.config import SimConfig

__all__ = ["check", "files_named"]


def check(configs: Sequence[SimConfig]) -> None:
    """Look every name up, build every policy and reclaimer, and open every trace that the configurations mention.

    Raises
    ------
    InputError
        For the first that cannot be used. What depends on a combination, such as a model too large for a device, shows
        when the run is made.
    """
    from sim.kv.policies import policies
    from sim.kv.reclaim import reclaimers
    from sim.serving.attention import attention_models
    from sim.serving.copy import copy_costs
    from sim.serving.cost import step_costs
    from sim.serving.hardware import get_hardware
    from sim.serving.models import get_model
    from sim.workload import open_source

    def known(registry: Any) -> Callable[[str], object]:
        return lambda spec: registry.get(spec.partition(":")[0])

    checks: dict[str, Callable[[str], object]] = {
        "model": get_model,
        "hardware": get_hardware,
        "policy": policies.build,
        "reclaimer": reclaimers.build,
        "attention": known(attention_models),
        "step_cost": known(step_costs),
        "copy_cost": known(copy_costs),
    }
    for field, look in checks.items():
        for value in _distinct(getattr(config, field) for config in configs):
            look(value)
    for trace, form, arrivals in _distinct((config.trace, config.format, config.arrivals) for config in configs):
        open_source(trace, format=form, arrivals=arrivals)


def files_named(config: SimConfig) -> list[str]:
    """Return the files and folders that a configuration names, as it names them."""
    found = [config.trace] if config.trace != "default" and os.path.exists(config.trace) else []
    for field in ("policy", "reclaimer", "attention", "step_cost", "copy_cost"):
        spec = getattr(config, field)
        names = [spec.partition(":")[2]]
        with contextlib.suppress(InputError):
            names += parse_spec(spec)[1].values()
        found += filter(os.path.isfile, names)
    return _distinct(found)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
