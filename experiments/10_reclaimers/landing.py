"""Measure blocks beyond the dense number, before the first repack of a request is in effect and after.

python experiments/10_reclaimers/landing.py: runs mooncake.toml's policies and budgets, writes landing.csv beside it and
prints it (three minutes of CPU).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sim.serving.engine import Engine
from sim.study.config import SimConfig
from sim.study.run import build_engine

HERE = Path(__file__).parent
RECLAIMERS = ("vtoken:repack_when=always", "reuse+vtoken:at_once=0", "reuse+vtoken")
SETTINGS: dict[str, dict[str, Any]] = {
    "as in mooncake.toml": {},
    "nobody waits for blocks": {"gpu_memory_utilization": 0.9},
    "copies take no time": {"copy_cost": "linear:base_s=0,per_token_s=0"},
}
THIN = 1.25
"""With that many times its dense number of blocks and two more, a request's prompt has not been repacked yet."""


class Landing:
    """Adds up the blocks beyond the dense number that each request holds while it decodes, by whether it is thin."""

    def __init__(self) -> None:
        self.decode_s: dict[int, float] = {}
        self.excess: dict[int, np.ndarray] = {}

    def scheduled(self, engine: Engine) -> None:
        """Note what is held during this step."""
        rows = engine.cache.store.s.rows[engine.scheduler.running[: engine.scheduler.num_running]]
        rows = rows[rows["decode_from"] > 0]
        dense = -(-rows["live"] // engine.cache.block_size)
        self._now = engine.now_ns, rows["ordinal"].tolist(), rows["blocks"].astype(float), dense.astype(float)

    def applied(self, engine: Engine, _: int) -> None:
        """Weigh it by how long the step took."""
        start_ns, ordinals, blocks, dense = self._now
        step_s = (engine.now_ns - start_ns) / 1e9
        for ordinal, held, least in zip(ordinals, blocks, dense, strict=True):
            self.decode_s[ordinal] = self.decode_s.get(ordinal, 0.0) + step_s
            excess = self.excess.setdefault(ordinal, np.zeros(2))
            excess[int(held <= THIN * least + 2)] += step_s * (held - least)

    def means(self) -> tuple[float, float]:
        """Return the means over requests of the mean over their decode, before and after."""
        rows = np.array([self.excess[k] / self.decode_s[k] for k in self.excess if self.decode_s[k] > 0])
        before, after = rows.mean(axis=0)
        return float(before), float(after)


def main() -> None:
    """Run and write."""
    spec = tomllib.loads((HERE / "mooncake.toml").read_text())
    rows = []
    for setting, changes in SETTINGS.items():
        for policy in spec["grid"]["policy"]:
            for budget in spec["grid"]["budget"]:
                for reclaimer in RECLAIMERS:
                    fields = spec["base"] | changes | {"policy": policy, "budget": budget, "reclaimer": reclaimer}
                    seen = Landing()
                    summary = build_engine(SimConfig(**fields), observer=seen).run().summary
                    before, after = seen.means()
                    rows.append(
                        {
                            "setting": setting,
                            "policy": policy,
                            "budget": budget,
                            "reclaimer": reclaimer,
                            "retained_blocks_mean": summary["retained_blocks_mean"],
                            "beyond_dense_before": before,
                            "beyond_dense_after": after,
                            "tokens_copied": summary["tokens_copied"],
                        }
                    )
    table = pd.DataFrame(rows)
    table.to_csv(HERE / "landing.csv", index=False, float_format="%.6g")
    print(table.round(2).to_string(index=False))


if __name__ == "__main__":
    main()
