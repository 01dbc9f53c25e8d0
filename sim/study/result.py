"""What a run gives back, in memory and on disk."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import InputError
from sim.study.columns import Columns, frame, read_parquet, write_parquet
from sim.study.config import SimConfig
from sim.study.export import complete_directory

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RunResult", "to_json"]


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON; what has no number (NaN, infinity) becomes ``null``, numpy scalars become Python's."""
    return json.dumps(_jsonable(value), indent=indent)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True, eq=False)
class RunResult:
    """One finished run.

    Attributes
    ----------
    config
        The full configuration.
    config_hash
        Its hash, see :meth:`SimConfig.hash`.
    summary
        The figures ``vtoken run --json`` prints.
    requests
        One entry a request: ``req_id``, ``status`` ("finished" or "refused"), ``arrival_s``, ``queue_s``, ``ttft_s``,
        ``tpot_s`` (NaN for one output token), ``e2e_s``, ``finish_s``, ``prompt_tokens``, ``output_tokens``,
        ``preemptions``, ``recomputed_tokens``, ``cached_tokens``, ``retained_blocks`` (mean over its decode, by time),
        ``retained_blocks_peak``, ``retained_blocks_finish``, ``over_retention``, ``tokens_evicted``, ``tokens_moved``.
    steps
        One entry a step, or a group of ``n_steps`` neighbouring steps: ``step``, ``n_steps``, ``clock_s`` (start),
        ``dt_s``, ``running``, ``waiting``, ``used_blocks``, ``free_blocks``, ``reserved_blocks``, ``live_slots``,
        ``dead_slots``, ``tail_slots``, ``sched_tokens``, ``sched_reqs``, ``preemptions``, ``freed_by_death``,
        ``freed_by_repack``, ``evicted``, ``moved``, ``copy_s``.
    liveness
        Samples over time of how many allocated blocks have which share of live slots: ``clock_s``, ``empty``,
        ``q1`` (0, 1/4], ``q2`` (1/4, 1/2], ``q3`` (1/2, 3/4], ``q4`` (3/4, 1), ``full``.
    pool_snapshot
        The pool around the repack that freed most, or None: ``clock_s`` and, for each block, ``live_before``,
        ``owner_before``, ``live_after``, ``owner_after`` (int32[N]; owner -1 is free).
    versions
        Of the software that made it.
    """

    config: SimConfig
    config_hash: str
    summary: dict[str, Any]
    requests: Columns
    steps: Columns
    liveness: Columns
    pool_snapshot: dict[str, Any] | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def requests_frame(self) -> pd.DataFrame:
        """Return :attr:`requests` as a data frame."""
        return frame(self.requests)

    def steps_frame(self) -> pd.DataFrame:
        """Return :attr:`steps` as a data frame."""
        return frame(self.steps)

    def liveness_frame(self) -> pd.DataFrame:
        """Return :attr:`liveness` as a data frame."""
        return frame(self.liveness)

    def save(self, out: str | Path) -> None:
        """Write the run's directory, as a whole or not at all.

        Raises
        ------
        InputError
            If the directory cannot be written or holds something other than a previous run.
        """
        with complete_directory(out) as directory:
            self.write_files(directory)

    def write_files(self, directory: Path) -> None:
        """Write the run's files into an existing directory."""
        about = {"config_hash": self.config_hash, "versions": self.versions, "config": self.config.model_dump()}
        (directory / "summary.json").write_text(to_json(self.summary, indent=2) + "\n")
        (directory / "config.json").write_text(to_json(about, indent=2) + "\n")
        write_parquet(directory / "requests.parquet", self.requests)
        write_parquet(directory / "steps.parquet", self.steps)
        write_parquet(directory / "liveness.parquet", self.liveness)
        if self.pool_snapshot is not None:
            pool = dict(self.pool_snapshot)
            clock_s = pool.pop("clock_s")
            write_parquet(directory / "pool.parquet", {"clock_s": np.full(len(pool["live_before"]), clock_s), **pool})

    @classmethod
    def load(cls, directory: str | Path) -> RunResult:
        """Read a run's directory.

        Raises
        ------
        InputError
            If a file is missing or damaged.
        """
        directory = Path(directory)
        about = _read_json(directory / "config.json")
        pool: dict[str, Any] | None = None
        if (directory / "pool.parquet").exists():
            pool = dict(read_parquet(directory / "pool.parquet"))
            pool["clock_s"] = float(pool["clock_s"][0])
        try:
            return cls(
                config=SimConfig.from_fields(about["config"], where=str(directory / "config.json")),
                config_hash=about["config_hash"],
                versions=about["versions"],
                summary=_read_json(directory / "summary.json"),
                requests=read_parquet(directory / "requests.parquet"),
                steps=read_parquet(directory / "steps.parquet"),
                liveness=read_parquet(directory / "liveness.parquet"),
                pool_snapshot=pool,
            )
        except KeyError as error:
            raise InputError(f"{directory / 'config.json'}: field {error} is missing") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file: not a run's directory, or an incomplete one") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
