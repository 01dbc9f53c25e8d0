"""The results store: one directory, one Parquet file a finished run, named by the hash of its configuration.

A file holds one row: the configuration's fields, the summary's figures, and the per-request, per-step and per-sample
columns as nested values. So ``pandas.read_parquet(DIR / "runs")`` is the table of all runs, DuckDB reads the same
files, and a column that is not asked for is not read. A file is written under a temporary name and renamed; what is not
a complete file of ours is set aside and reported, never trusted. Nothing in it depends on when or where it was made:
wall times go to ``timing.csv``, which differs from sweep to sweep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import InputError
from sim.study.columns import Columns, from_struct, to_struct
from sim.study.config import BUDGETS, SimConfig
from sim.study.export import write_atomically
from sim.study.result import RunResult, to_json
from sim.study.thin import thin_steps
from sim.study.versions import package_version

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["Aside", "Store", "flat_summary"]

FORMAT = b"1"
STEP_ROWS = 2048
NESTED = ("per_request", "per_step", "per_sample", "pool")
TIMING = frozenset({"wall_s", "cpu_s"})
"""Summary figures that are not results: they differ from machine to machine."""


@dataclasses.dataclass(frozen=True)
class Aside:
    """A file that was moved out of the store, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Store:
    """Finished runs in ``root/runs``.

    Parameters
    ----------
    root
        Directory of the sweep. It is made on the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.runs = self.root / "runs"
        self.failed = self.root / "failed"

    def path(self, config_hash: str) -> Path:
        """Return the file of a run."""
        return self.runs / f"{config_hash}.parquet"

    def create(self) -> None:
        """Make the directories.

        Raises
        ------
        InputError
            If ``root`` is a file, holds something that is not a sweep, or cannot be written.
        """
        if self.root.is_dir() and any(self.root.iterdir()) and not self.is_store(self.root):
            raise InputError(f"{self.root}: not empty, and not a sweep's directory; choose another")
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            self.failed.mkdir(exist_ok=True)
            (self.root / ".lock").touch()
        except OSError as error:
            raise InputError(f"{self.root}: cannot write there: {error.strerror}") from None

    @staticmethod
    def is_store(directory: Path) -> bool:
        """Tell whether a directory is a sweep's."""
        return (directory / "runs").is_dir()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other sweeps out while the block runs; the lock ends with the process, however that ends.

        Raises
        ------
        InputError
            If another process writes to this store.
        """
        import fcntl

        with open(self.root / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    f"{self.root}: another sweep is writing there; wait for it or choose another"
                ) from None
            yield

    def put(self, config_hash: str, result: RunResult) -> None:
        """Write a finished run; a reader sees all of it or nothing."""
        import pyarrow.parquet as pq

        temporary = self.runs / f".{config_hash}.{os.getpid()}.tmp"
        # One row: neither dictionaries nor statistics are worth their bytes.
        pq.write_table(
            _to_table(config_hash, result),
            temporary,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
        temporary.replace(self.path(config_hash))
        (self.failed / f"{config_hash}.json").unlink(missing_ok=True)

    def put_failure(self, config_hash: str, config: SimConfig, error: str, traceback: str = "") -> None:
        """Record that a run failed; it is tried again by the next sweep."""
        record = {"config_hash": config_hash, "error": error, "config": config.model_dump(), "traceback": traceback}
        write_atomically(self.failed / f"{config_hash}.json", to_json(record, indent=2) + "\n")

    def failures(self) -> dict[str, str]:
        """Return the one-line error of each failed run by its hash."""
        records = [json.loads(path.read_text()) for path in sorted(self.failed.glob("[!.]*.json"))]
        return {record["config_hash"]: record["error"] for record in records}

    def clean(self) -> int:
        """Remove what killed processes left behind; return how many files that were. Call it under the lock."""
        left = [path for folder in (self.root, self.runs, self.failed) for path in folder.glob(".*.tmp")]
        for path in left:
            path.unlink()
        return len(left)

    def scan(self, *, version: str | None = None) -> tuple[set[str], list[Aside]]:
        """Check every file, and move those which cannot be trusted to ``root/set_aside``.

        Parameters
        ----------
        version
            Set runs of any other version of this package aside, too.

        Returns
        -------
        finished, aside
            Hashes of the runs that are complete, and what was moved.
        """
        finished: set[str] = set()
        aside: list[Aside] = []
        for path in self._files():
            row = _examine(path, version)
            if isinstance(row, str):
                aside.append(Aside(_move_aside(path, self.root / "set_aside"), row))
            else:
                finished.add(path.stem)
        return finished, aside

    def _files(self) -> list[Path]:
        return sorted(path for path in self.runs.glob("*") if not path.name.startswith("."))

    def load(self, config_hash: str) -> RunResult:
        """Read one run.

        Raises
        ------
        InputError
            If it is missing, damaged, or not ours.
        """
        return _from_table(_read(self.path(config_hash)), self.path(config_hash))

    def frame(self) -> tuple[pd.DataFrame, list[Aside]]:
        """Return the table of all finished runs (configuration and summary), and the files that could not be used.

        Rows are ordered by the configuration, so that equal stores give equal tables. Nothing is moved.
        """
        import pandas as pd
        import pyarrow as pa

        tables: list[pa.Table] = []
        aside: list[Aside] = []
        for path in self._files():
            row = _examine(path)
            if isinstance(row, str):
                aside.append(Aside(path, row))
            else:
                tables.append(row)
        if not tables:
            return pd.DataFrame(), aside
        table = pa.concat_tables(tables, promote_options="permissive").to_pandas()
        for name, field in SimConfig.model_fields.items():
            if name not in table:  # younger than every run here
                table[name] = field.default
        order = ["policy", *BUDGETS, "reclaimer", "seed", "config_hash"]
        rest = [name for name in SimConfig.model_fields if name not in order]
        table = table.sort_values([*order[:-2], *rest, *order[-2:]], kind="stable", ignore_index=True)
        return table.drop(columns=["config_json", "summary_json", "versions_json"]), aside

    def write_tables(self, table: pd.DataFrame) -> None:
        """Write a table of all runs as ``summary.csv`` and ``summary.parquet``."""
        binary = io.BytesIO()
        table.to_parquet(binary, index=False)
        write_atomically(self.root / "summary.csv", table.to_csv(index=False))
        write_atomically(self.root / "summary.parquet", binary.getvalue())


def flat_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Flatten ``{"ttft_s": {"p95": x}}`` to ``{"ttft_s_p95": x}``, leaving out timing of the simulation itself."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat.update({f"{key}_{part}": item for part, item in value.items()})
        elif key not in TIMING and not isinstance(value, list | tuple):
            flat[key] = value
    return flat


def _arrow_type(annotation: Any) -> pa.DataType:
    """Return the column type of a configuration field, the same whether or not it has a value."""
    import pyarrow as pa

    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}.get(annotation, pa.string())


def _to_table(config_hash: str, result: RunResult) -> pa.Table:
    """Return the one row of a run."""
    import pyarrow as pa

    summary = {key: value for key, value in result.summary.items() if key not in TIMING}
    columns: dict[str, Any] = {"config_hash": pa.array([config_hash])}
    for name, field in SimConfig.model_fields.items():
        columns[name] = pa.array([getattr(result.config, name)], _arrow_type(field.annotation))
    for name, value in flat_summary(summary).items():
        if name not in columns and name not in NESTED:
            plain = value.item() if hasattr(value, "item") else value
            columns[name] = pa.array([plain], pa.float64() if plain is None else None)
    columns["config_json"] = pa.array([result.config.to_json()])
    columns["summary_json"] = pa.array([to_json(summary)])
    columns["versions_json"] = pa.array([to_json(result.versions)])
    columns["vtoken_version"] = pa.array([package_version()])
    nested = {
        "per_request": result.requests,
        "per_step": thin_steps(result.steps, STEP_ROWS),
        "per_sample": result.liveness,
        "pool": _pool_columns(result.pool_snapshot),
    }
    columns |= {name: to_struct(values) for name, values in nested.items()}
    return pa.table(columns).replace_schema_metadata({b"vtoken_store": FORMAT})


def _pool_columns(snapshot: dict[str, Any] | None) -> Columns:
    """Return the snapshot as columns; no snapshot is one with no blocks."""
    import numpy as np

    names = ("live_before", "owner_before", "live_after", "owner_after")
    if snapshot is None:
        return {"clock_s": np.zeros(0)} | {name: np.zeros(0, np.int32) for name in names}
    return {"clock_s": np.array([snapshot["clock_s"]])} | {name: snapshot[name] for name in names}


def _from_table(table: pa.Table, path: Path) -> RunResult:
    row = {name: table[name].combine_chunks() for name in table.column_names}
    pool: dict[str, Any] | None = dict(from_struct(row["pool"]))
    assert pool is not None
    if len(pool["clock_s"]):
        pool["clock_s"] = float(pool["clock_s"][0])
    else:
        pool = None
    return RunResult(
        config=SimConfig.from_json(row["config_json"][0].as_py(), where=str(path)),
        config_hash=row["config_hash"][0].as_py(),
        summary=json.loads(row["summary_json"][0].as_py()),
        requests=from_struct(row["per_request"]),
        steps=from_struct(row["per_step"]),
        liveness=from_struct(row["per_sample"]),
        pool_snapshot=pool,
        versions=json.loads(row["versions_json"][0].as_py()),
    )


def _read(path: Path) -> pa.Table:
    """Read a run's whole row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise InputError(f"{path}: no such run") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged: {error}") from None


def _examine(path: Path, version: str | None = None) -> pa.Table | str:
    """Return a run's row without its nested columns, or why the file cannot be taken for a finished run.

    Truncation anywhere shows, because the index of a Parquet file is at its end; every page that is read is compared
    with its checksum. The pages of nested columns are left to :meth:`Store.load`, or resuming a large sweep would read
    all of it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix != ".parquet" or not path.is_file():
        return "not a run of this store"
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if (file.schema_arrow.metadata or {}).get(b"vtoken_store") != FORMAT:
                return "a Parquet file, but not a run of this store"
            names = [name for name in file.schema_arrow.names if name not in NESTED]
            row = file.read(columns=names, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        return f"truncated or damaged: {' '.join(str(error).split())[:120]}"
    if row.num_rows != 1 or row["config_hash"][0].as_py() != path.stem:
        return "its name is not the hash of the configuration inside"
    made_by = row["vtoken_version"][0].as_py()
    if version is not None and made_by != version:
        return f"made by version {made_by}, this is {version}"
    return row


def _move_aside(path: Path, folder: Path) -> Path:
    """Move a file into ``folder`` under a name that is free there."""
    folder.mkdir(exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}.{number}" for number in itertools.count(1)))
    return path.rename(next(folder / name for name in names if not (folder / name).exists()))
