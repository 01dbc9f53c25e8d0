"""Generated workloads against what is known of their distributions in closed form."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import InputError
from sim.rng import stream
from sim.workload import GeneratedSource, Trace, generators, open_source, parse_lengths, read_trace, write_trace

N = 40_000


def gaps(spec: str, seed: int = 1) -> np.ndarray:
    return np.diff(read_trace(spec, seed=seed).arrival_ns) / 1e9


@pytest.mark.parametrize(
    ("spec", "mean", "cv"),
    [
        (f"poisson:rate=16,n={N}", 1 / 16, 1.0),
        (f"gamma:rate=16,cv=0.5,n={N}", 1 / 16, 0.5),
        (f"gamma:rate=2,cv=3,n={4 * N}", 1 / 2, 3.0),
        (f"weibull:rate=16,shape=1,n={N}", 1 / 16, 1.0),
        # CV of a Weibull variable of shape k: sqrt(G(1 + 2/k) / G(1 + 1/k)^2 - 1)
        (f"weibull:rate=16,shape=0.5,n={4 * N}", 1 / 16, math.sqrt(math.gamma(5) / math.gamma(3) ** 2 - 1)),
    ],
)
def test_gaps_have_the_mean_and_the_variation_asked_for(spec: str, mean: float, cv: float) -> None:
    sample = gaps(spec)
    assert sample.mean() == pytest.approx(mean, rel=6 * cv / math.sqrt(len(sample)))
    assert sample.std() / sample.mean() == pytest.approx(cv, rel=0.06)


def test_poisson_counts_are_not_dispersed() -> None:
    description = read_trace(f"poisson:rate=16,n={N}", seed=1).describe()
    assert description.dispersion["1 s"] == pytest.approx(1.0, abs=0.1)
    assert description.gap_cv == pytest.approx(1.0, abs=0.03)


def test_bursts_have_their_mean_rate_and_are_silent_between() -> None:
    trace = read_trace("onoff:rate_on=30,on_s=2,off_s=4,duration_s=6000", seed=1)
    assert len(trace) / 6000 == pytest.approx(10, rel=0.06)
    assert trace.describe().dispersion["10 s"] > 10
    silent = gaps("onoff:rate_on=1000,on_s=1,off_s=4,n=100000")
    assert silent[silent > 0.05].mean() == pytest.approx(4, rel=0.25)


def test_dispersion_of_bursts_follows_the_closed_form() -> None:
    # Counts of a Poisson process whose rate is m +- d, switching with time constant tau = T / 2:
    # variance / mean = 1 + 2 d^2 tau / m * (1 - tau / w * (1 - exp(-w / tau))) over windows w.
    m, d, tau, w = 5.5, 1.5, 5.0, 10.0
    expected = 1 + 2 * d**2 * tau / m * (1 - tau / w * (1 - math.exp(-w / tau)))
    trace = read_trace("onoff:rate_on=7,rate_off=4,on_s=10,off_s=10,duration_s=60000", seed=3)
    assert trace.describe().dispersion["10 s"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("text", "mean", "p95"),
    [
        ("200", 200, 200),
        ("uniform:100:300", 200, 290),
        ("uniform:100..300", 200, 290),
        ("lognormal:1000:0.8", 1000, 1000 * math.exp(1.6449 * 0.8 - 0.32)),
        ("lognormal:median=400:sigma=0.5", 400 * math.exp(0.125), 400 * math.exp(1.6449 * 0.5)),
        ("lognormal:mean=1155:p95=4083", 1155, 4083),
        ("lognormal:median=100:p95=300", 100 * math.exp((math.log(3) / 1.6449) ** 2 / 2), 300),
        ("uniform:10:10@1+uniform:30:30@3", 25, 30),
        ("lognormal:1000:0:max=700", 700, 700),
    ],
)
def test_lengths_have_the_figures_asked_for(text: str, mean: float, p95: float) -> None:
    sample = parse_lengths(text).draw(np.random.default_rng(1), 60_000)
    assert sample.dtype == np.int64
    assert sample.mean() == pytest.approx(mean, rel=0.03)
    assert np.percentile(sample, 95) == pytest.approx(p95, rel=0.03)


def test_zipf_frequencies() -> None:
    sample = parse_lengths("zipf:1.5:100").draw(np.random.default_rng(1), 100_000)
    weights = np.arange(1, 101) ** -1.5
    for k in (1, 2, 10):
        assert (sample == k).mean() == pytest.approx(weights[k - 1] / weights.sum(), rel=0.1)
    assert sample.max() <= 100


@given(
    text=st.sampled_from(["lognormal:3:3", "uniform:1:2", "zipf:2:5", "lognormal:1:5@1+uniform:1:9@2"]),
    seed=st.integers(0, 99),
)
def test_every_length_is_at_least_one(text: str, seed: int) -> None:
    assert parse_lengths(text).draw(np.random.default_rng(seed), 500).min() >= 1


SPECS = [
    "poisson:rate=16,n=20000,prompt=lognormal:1000:0.8,output=uniform:1:400",
    "gamma:rate=16,cv=3,n=9000,shared_prefix=100,groups=3",
    "weibull:rate=16,shape=0.7,n=8193",
    "onoff:rate_on=100,on_s=1,off_s=3,duration_s=700,start_s=5",
]


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_drawn_does_not_depend_on_how_it_is_read(spec: str) -> None:
    source = open_source(spec, seed=7)
    assert isinstance(source, GeneratedSource)
    whole = Trace.concat(source.chunks())
    for size in (1000, 4097, 10**6):
        assert Trace.concat(source.chunks(size)).same_requests(whole)
    assert all(len(chunk) <= 1000 for chunk in source.chunks(1000))


def test_a_longer_workload_begins_with_the_shorter_one() -> None:
    short = read_trace("gamma:rate=9,cv=2,n=500,prompt=uniform:1:99")
    assert read_trace("gamma:rate=9,cv=2,n=20000,prompt=uniform:1:99")[:500].same_requests(short)


def test_seeds_differ_and_zero_is_one_of_them() -> None:
    a, b, c = (read_trace("poisson:rate=1,n=50", seed=seed) for seed in (0, 0, 1))
    assert a.same_requests(b)
    assert not a.same_requests(c)


def test_lengths_leave_the_arrivals_alone() -> None:
    a = read_trace("poisson:rate=1,n=50,prompt=100")
    b = read_trace("poisson:rate=1,n=50,prompt=lognormal:100:1,shared_prefix=64,groups=4")
    assert a.arrival_ns.tolist() == b.arrival_ns.tolist()
    assert a.output_tokens.tolist() == b.output_tokens.tolist()


def test_duration_and_start_bound_the_arrivals() -> None:
    source = open_source("poisson:rate=10,duration_s=100,start_s=50")
    trace = Trace.concat(source.chunks())
    assert source.total is None
    assert trace.arrival_s.min() >= 50
    assert trace.arrival_s.max() < 150
    assert len(trace) == pytest.approx(1000, abs=160)
    assert len(read_trace("poisson:rate=10,duration_s=100,n=5")) == 5
    assert open_source("poisson:rate=10").total == len(read_trace("poisson:rate=10")) == 1000


def test_groups_share_the_whole_blocks_of_their_prefix() -> None:
    trace = read_trace("poisson:rate=1,n=400,prompt=10,shared_prefix=100,groups=3,hash_tokens=16")
    assert trace.hash_tokens == 16
    assert set(trace.prompt_tokens.tolist()) == {110}
    assert trace.prefix_hashes is not None
    kinds = {tuple(ids.tolist()) for ids in trace.prefix_hashes}
    assert len(kinds) == 3
    assert all(len(kind) == 100 // 16 for kind in kinds)
    assert len(set(itertools.chain.from_iterable(kinds))) == 18, "groups share nothing with each other"
    assert trace.describe().prefix_reuse == pytest.approx(397 / 400 * 96 / 110)


@pytest.mark.parametrize("degree", [1, 3, 8])
def test_degree_says_how_many_requests_one_after_the_other_share_a_prefix(degree: int) -> None:
    spec = f"poisson:rate=1,n=9000,prompt=10,shared_prefix=64,degree={degree}"
    trace = read_trace(spec)
    assert trace.prefix_hashes is not None
    kinds = [tuple(ids.tolist()) for ids in trace.prefix_hashes]
    assert all(len(set(kinds[k : k + degree])) == 1 for k in range(0, 9000, degree))
    assert len(set(kinds)) == -(-9000 // degree)
    assert len(set(itertools.chain.from_iterable(kinds))) == 4 * len(set(kinds))
    # Who shares with whom changes nothing else.
    other = read_trace(spec.replace(f"degree={degree}", "groups=5"))
    assert (trace.arrival_ns == other.arrival_ns).all()
    assert (trace.output_tokens == other.output_tokens).all()


def test_pairs_of_lengths_are_drawn_together(tmp_path: Path) -> None:
    pairs = Trace(np.array([0, 1, 2]), np.array([10, 20, 30]), np.array([1, 2, 3]))
    write_trace(pairs, tmp_path / "pairs.csv")
    trace = read_trace(f"poisson:rate=1,n=300,lengths={tmp_path / 'pairs.csv'}")
    assert (trace.prompt_tokens == 10 * trace.output_tokens).all()
    assert set(trace.output_tokens.tolist()) == {1, 2, 3}
    (tmp_path / "only.csv").write_text("prompt_tokens,reply_tokens\n7,8\n")
    assert set(read_trace(f"poisson:rate=1,n=3,lengths={tmp_path / 'only.csv'}").prompt_tokens.tolist()) == {7}


def test_memory_does_not_grow_with_the_trace() -> None:
    import tracemalloc

    source = open_source("poisson:rate=16,n=300000,prompt=lognormal:1000:0.8", seed=1)
    tracemalloc.start()
    total = sum(len(chunk) for chunk in source.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 300_000
    assert peak < 4 * 2**20, "the columns alone would be 7 MB"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("poisson", "needs rate"),
        ("poisson:rate=0", "above 0"),
        ("poisson:rate=nan", "expected a number"),
        ("poisson:rate=4,cv=2", "has no parameter 'cv'"),
        ("poisson:rate=4,promt=2", "did you mean 'prompt'"),
        ("poisson:rate=4,n=0", "at least 1 request"),
        ("poisson:rate=1e-9,n=100000", "146 years"),
        ("gamma:rate=4,cv=0", r"expected 0\.01"),
        ("onoff:rate_on=1,on_s=1e-6,off_s=1e9", "requests a cycle"),
        ("poisson:rate=4,prompt=0", "fixed length: expected 1"),
        ("poisson:rate=4,prompt=lognorml:3:1", "did you mean 'lognormal'"),
        ("poisson:rate=4,prompt=lognormal:3", "one of sigma and p95"),
        ("poisson:rate=4,prompt=lognormal:mean=3:median=3:sigma=1", "one of mean and median"),
        ("poisson:rate=4,prompt=lognormal:mean=100:p95=500", "at most 3.87 times the mean"),
        ("poisson:rate=4,prompt=uniform:5:1", "1 <= low <= high"),
        ("poisson:rate=4,prompt=uniform:1:2:3", "at most 2 arguments"),
        ("poisson:rate=4,prompt=5@1+6", "@WEIGHT"),
        ("poisson:rate=4,lengths=absent.csv", "absent.csv: cannot be read"),
        ("poison:rate=4", "did you mean 'poisson'"),
    ],
)
def test_wrong_specifications_say_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        list(open_source(spec).chunks())
    assert "\n" not in str(error.value)


def test_all_generators_start_after_zero_and_never_go_back() -> None:
    specs = {
        "poisson": "poisson:rate=5",
        "gamma": "gamma:rate=5,cv=2",
        "weibull": "weibull:rate=5,shape=0.6",
        "onoff": "onoff:rate_on=9,on_s=1,off_s=1",
    }
    assert set(specs) == set(generators)
    for spec in specs.values():
        pieces = itertools.islice(generators.build(spec).arrivals(stream(0, "test")), 30)
        times = np.concatenate(list(pieces))
        assert times[0] > 0
        assert (np.diff(times) >= 0).all()


def test_the_grammar_in_the_docstring_works() -> None:
    import sim.workload.lengths as module

    lines = re.findall(r"^    (\S+)  ", module.__doc__ or "", flags=re.MULTILINE)
    assert len(lines) >= 6
    for text in lines:
        assert parse_lengths(text).draw(np.random.default_rng(0), 3).min() >= 1
