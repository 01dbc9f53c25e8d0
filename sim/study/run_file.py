"""A finished run as one Parquet file of one row, and that row without its nested values as JSON.

The row holds the configuration's fields, the summary's figures, and the per-request, per-step and per-sample columns as
nested values. Nothing in it depends on when or where it was made.
"""

from __future__ import annotations

import dataclasses
import io
import json
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import InputError
from sim.study.columns import Columns, from_struct, to_struct
from sim.study.config import SimConfig
from sim.study.result import RunResult, to_json
from sim.study.thin import thin_steps
from sim.study.versions import package_version

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["STEP_ROWS", "Packed", "Row", "examine", "flat_summary", "pack", "table", "unpack"]

FORMAT = b"1"
STEP_ROWS = 2048
NESTED = ("per_request", "per_step", "per_sample", "pool")
TIMING = frozenset({"wall_s", "cpu_s"})
"""Summary figures that are not results: they differ from machine to machine."""
TEXT = frozenset({"first_refusal"})
"""Summary figures that are text where they are not None."""

Row = dict[str, Any]
"""``config`` and ``summary`` of a run, and the ``version`` that made it."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A run's file, and its row as JSON text."""

    data: bytes
    row: str


def pack(config_hash: str, result: RunResult) -> Packed:
    """Return the file that holds a run; the same bytes for the same result."""
    import pyarrow.parquet as pq

    file = io.BytesIO()
    # One row: neither dictionaries nor statistics are worth their bytes.
    pq.write_table(
        _to_table(config_hash, result),
        file,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    row = {"config": result.config.model_dump(), "summary": _results(result), "version": package_version()}
    return Packed(file.getvalue(), to_json(row))


def unpack(path: Path) -> RunResult:
    """Read a run's file.

    Raises
    ------
    InputError
        If it is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return _from_table(pq.read_table(path, page_checksum_verification=True), path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such run") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged: {error}") from None


def table(rows: dict[str, Row]) -> pa.Table:
    """Return the configurations and flat summaries of runs, given their rows by hash; every column has one type."""
    import pyarrow as pa

    # A figure with the name of a field gives way to it, as in the file.
    flat = [
        {"config_hash": key, **dict.fromkeys(row["config"])}
        | flat_summary(row["summary"])
        | row["config"]
        | {"vtoken_version": row["version"]}
        for key, row in rows.items()
    ]
    columns = {}
    for name in dict.fromkeys(name for row in flat for name in row):
        field = SimConfig.model_fields.get(name)
        figures = [row.get(name) for row in flat]
        some = next((value for value in figures if value is not None), None)
        columns[name] = pa.array(figures, _figure_type(name, some) if field is None else _arrow_type(field.annotation))
    return pa.table(columns)


def flat_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """Flatten ``{"ttft_s": {"p95": x}}`` to ``{"ttft_s_p95": x}``, leaving out timing of the simulation itself."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat.update({f"{key}_{part}": item for part, item in value.items()})
        elif key not in TIMING and not isinstance(value, list | tuple):
            flat[key] = value
    return flat


def _results(result: RunResult) -> dict[str, Any]:
    return {key: value for key, value in result.summary.items() if key not in TIMING}


def _arrow_type(annotation: Any) -> pa.DataType:
    """Return the column type of a configuration field, the same whether or not it has a value."""
    import pyarrow as pa

    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}.get(annotation, pa.string())


def _figure_type(name: str, value: Any) -> pa.DataType | None:
    """Return the column type of a summary figure, the same whether or not it has a value; None is the value's own."""
    import pyarrow as pa

    if name in TEXT:
        return pa.string()
    return pa.float64() if value is None else None


def _to_table(config_hash: str, result: RunResult) -> pa.Table:
    """Return the one row of a run."""
    import pyarrow as pa

    summary = _results(result)
    columns: dict[str, Any] = {"config_hash": pa.array([config_hash])}
    for name, field in SimConfig.model_fields.items():
        columns[name] = pa.array([getattr(result.config, name)], _arrow_type(field.annotation))
    for name, value in flat_summary(summary).items():
        if name not in columns and name not in NESTED:
            plain = value.item() if hasattr(value, "item") else value
            columns[name] = pa.array([plain], _figure_type(name, plain))
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


def examine(path: Path) -> Row | str:
    """Return a run's row, or why the file cannot be taken for a finished run.

    Truncation anywhere shows, because the index of a Parquet file is at its end; every page that is read is compared
    with its checksum. The pages of nested columns are left to :func:`unpack`, or resuming a large sweep would read all
    of it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix != ".parquet" or not path.is_file():
        return "not a run of this store"
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            if (schema.metadata or {}).get(b"vtoken_store") != FORMAT:
                return "a Parquet file, but not a run of this store"
            row = file.read(columns=[name for name in schema.names if name not in NESTED], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        return f"truncated or damaged: {' '.join(str(error).split())[:120]}"
    if row.num_rows != 1 or row["config_hash"][0].as_py() != path.stem:
        return "its name is not the hash of the configuration inside"
    return {
        "config": json.loads(row["config_json"][0].as_py()),
        "summary": json.loads(row["summary_json"][0].as_py()),
        "version": row["vtoken_version"][0].as_py(),
    }
