"""The results store: one directory, one Parquet file a finished run, named by the hash of its configuration.

A file holds one row (:mod:`sim.study.run_file`). So ``pandas.read_parquet(DIR / "runs")`` is the table of all runs,
DuckDB reads the same files, and a column that is not asked for is not read. A file is written under a temporary name
and renamed; what is not a complete file of ours is set aside and reported, never trusted. Only one process writes: the
one that holds the lock. What differs between equal sweeps is in ``timing.csv`` and ``index.jsonl``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import InputError
from sim.study.config import BUDGETS, SimConfig
from sim.study.export import write_atomically
from sim.study.index import Entry, Index
from sim.study.result import RunResult, to_json
from sim.study.run_file import Packed, Row, examine, pack, table, unpack

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Aside", "Store"]


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
        self.index = Index(self.root / "index.jsonl")

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

    def put(self, config_hash: str, run: RunResult | Packed) -> None:
        """Write a finished run; a reader sees all of it or nothing."""
        packed = pack(config_hash, run) if isinstance(run, RunResult) else run
        path = self.path(config_hash)
        write_atomically(path, packed.data)
        self.index.add(Entry.of(path, json.loads(packed.row)))
        (self.failed / f"{config_hash}.json").unlink(missing_ok=True)

    def put_failure(self, config_hash: str, config: SimConfig, error: str, traceback: str = "") -> None:
        """Record that a run failed; it is tried again by the next sweep."""
        record = {"config_hash": config_hash, "error": error, "config": config.model_dump(), "traceback": traceback}
        write_atomically(self.failed / f"{config_hash}.json", to_json(record, indent=2) + "\n")

    def failures(self) -> dict[str, str]:
        """Return the one-line error of each failed run by its hash."""
        errors: dict[str, str] = {}
        for path in sorted(self.failed.glob("[!.]*.json")):
            try:
                errors[path.stem] = json.loads(path.read_text(encoding="utf-8"))["error"]
            except (OSError, ValueError, KeyError, TypeError):
                errors[path.stem] = f"{path} cannot be read"
        return errors

    def missing(self) -> int:
        """Return how many runs of the last sweep here are not finished; 0 if none was here."""
        try:
            wanted = json.loads((self.root / "sweep.json").read_text(encoding="utf-8"))["runs"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return sum(not self.path(config_hash).exists() for config_hash in wanted)

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
        # Without their rows: a large store's would fill the memory, and only the version is asked for.
        known = {each.name: dataclasses.replace(each, row={"version": each.row["version"]}) for each in self.index}
        self.index.mend()
        for path in self._files():
            entry = known.get(path.name)
            row: Row | str
            if entry is not None and entry.holds(path.stat()):
                row = entry.row
            else:
                row = examine(path)
                if not isinstance(row, str):
                    self.index.add(Entry.of(path, row))
            if not isinstance(row, str) and version not in (None, row["version"]):
                row = f"made by version {row['version']}, this is {version}"
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
        return unpack(self.path(config_hash))

    def frame(self) -> tuple[pd.DataFrame, list[Aside]]:
        """Return the table of all finished runs (configuration and summary), and the files that could not be used.

        Rows are ordered by the configuration, so that equal stores give equal tables. Nothing is moved.
        """
        import pandas as pd

        files = {path.name: path for path in self._files()}
        rows: dict[str, Row] = {}
        for entry in self.index:
            with contextlib.suppress(KeyError, OSError):
                if entry.holds(files[entry.name].stat()):
                    rows[entry.config_hash] = entry.row
                    del files[entry.name]
        aside: list[Aside] = []
        for path in files.values():
            row = examine(path)
            if isinstance(row, str):
                aside.append(Aside(path, row))
            else:
                rows[path.stem] = row
        if not rows:
            return pd.DataFrame(), aside
        runs = table(dict(sorted(rows.items()))).to_pandas()
        for name, field in SimConfig.model_fields.items():
            if name not in runs:  # younger than every run here
                runs[name] = field.default
        order = ["policy", *BUDGETS, "reclaimer", "seed", "config_hash"]
        rest = [name for name in SimConfig.model_fields if name not in order]
        return runs.sort_values([*order[:-2], *rest, *order[-2:]], kind="stable", ignore_index=True), aside

    def write_tables(self, table: pd.DataFrame) -> None:
        """Write a table of all runs as ``summary.csv`` and ``summary.parquet``."""
        binary = io.BytesIO()
        table.to_parquet(binary, index=False)
        write_atomically(self.root / "summary.csv", table.to_csv(index=False))
        write_atomically(self.root / "summary.parquet", binary.getvalue())


def _move_aside(path: Path, folder: Path) -> Path:
    """Move a file into ``folder`` under a name that is free there."""
    folder.mkdir(exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}.{number}" for number in itertools.count(1)))
    return path.rename(next(folder / name for name in names if not (folder / name).exists()))
