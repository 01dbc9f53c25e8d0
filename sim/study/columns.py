"""Named numpy columns to and from Parquet and pandas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["Columns", "frame", "from_struct", "read_parquet", "to_struct", "write_parquet"]

Columns = dict[str, np.ndarray[Any, Any]]
"""Columns of equal length by name."""


def frame(columns: Mapping[str, np.ndarray[Any, Any]]) -> pd.DataFrame:
    """Return the columns as a data frame."""
    import pandas as pd

    return pd.DataFrame(dict(columns))


def _array(values: np.ndarray[Any, Any]) -> pa.Array[Any]:
    """Return an Arrow array; anything that is not a number becomes text."""
    import pyarrow as pa

    if values.dtype.kind in "OUS":
        return pa.array([str(v) for v in values.tolist()], pa.string())
    return pa.array(values)


def _numpy(values: pa.Array[Any]) -> np.ndarray[Any, Any]:
    """Return a numpy array; text becomes an object array of ``str``."""
    import pyarrow as pa

    if pa.types.is_string(values.type):
        return np.array(values.to_pylist(), dtype=object)
    numbers: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return numbers


def write_parquet(path: Path, columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write columns to a Parquet file with page checksums; equal columns give equal bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: _array(values) for name, values in columns.items()})
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def read_parquet(path: Path) -> Columns:
    """Read what :func:`write_parquet` wrote.

    Raises
    ------
    InputError
        If the file is missing, truncated, damaged, or not Parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a complete Parquet file: {error}") from None
    return {name: _numpy(table[name].combine_chunks()) for name in table.column_names}


def to_struct(columns: Mapping[str, np.ndarray[Any, Any]]) -> pa.StructArray:
    """Return one Arrow value that holds all columns: a struct of lists."""
    import pyarrow as pa

    lists = []
    for values in columns.values():
        items = _array(values)
        lists.append(pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items))
    return pa.StructArray.from_arrays(lists, names=list(columns))


def from_struct(value: pa.StructArray) -> Columns:
    """Read what :func:`to_struct` made."""
    return {field.name: _numpy(value.field(index).slice(0, 1).flatten()) for index, field in enumerate(value.type)}
