"""torch.cuda's calls that clocks make, against a device that keeps time by itself."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace


class StandInCuda:
    """The calls of torch.cuda that the clock makes: streams are numbers on one device that does one thing at a time."""

    def __init__(self) -> None:
        self.ns = {"default": 0.0}
        self.now = "default"
        self.recording: list | None = None
        self.captures = 0
        self.Event, self.CUDAGraph = self.make_event, self.make_graph
        self._sleep = lambda cycles: self.work(cycles / 2)

    def work(self, ns: float) -> None:
        if self.recording is not None:
            self.recording.append(ns)
        else:
            self.ns[self.now] += ns

    def Stream(self, _device):  # noqa: N802
        name = f"stream {len(self.ns)}"
        self.ns[name] = 0.0
        wait = lambda event: self.ns.__setitem__(name, max(self.ns[name], event.at))  # noqa: E731
        return SimpleNamespace(name=name, synchronize=lambda: None, wait_event=wait)

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before

    def current_stream(self, _device):
        return SimpleNamespace(name=self.now, synchronize=lambda: None)

    def synchronize(self, _device):
        latest = max(self.ns.values())
        self.ns = dict.fromkeys(self.ns, latest)

    def make_event(self, enable_timing: bool = False):
        event = SimpleNamespace(at=0.0, timed=enable_timing, synchronize=lambda: None)

        def record(stream=None):
            event.at = self.ns[stream.name if stream is not None else self.now]

        def elapsed_time(other):
            assert event.timed
            assert other.timed
            return (other.at - event.at) / 1e6

        event.record, event.elapsed_time = record, elapsed_time
        return event

    def make_graph(self):
        graph = SimpleNamespace(content=[])
        graph.replay = lambda: [self.work(ns) for ns in graph.content]
        return graph

    @contextmanager
    def graph(self, graph, stream):
        self.captures += 1
        self.recording = graph.content
        with self.stream(stream):
            yield
        self.recording = None
