"""Other people's formats: a small sample of each, and the real files where they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from sim.errors import InputError
from sim.workload import Request, Trace, open_source, read_trace
from sim.workload.readers import TraceReader, reader_for, trace_readers
from sim.workload.readers.base import look

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces (../shared/traces) are not here")

SAMPLES = {
    "canonical": "req_id,arrival_s,prompt_tokens,output_tokens\na,0,5,2\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,374,44\n",
    "lengths": "conversation,prompt_tokens,reply_tokens,n_turns\n12,30,40,2\n",
    "mooncake": '{"timestamp": 27, "input_length": 1300, "output_length": 40, "hash_ids": [0, 1, 2]}\n',
    "bailian": '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 3}\n',
    "llmservingsim": '{"input_toks": 128, "output_toks": 16, "arrival_time_ns": 7}\n',
    "vllm_custom": '{"prompt": "What is the capital of India?", "output_tokens": 10}\n',
    "sharegpt": json.dumps([{"id": "a", "conversations": [{"from": "human", "value": "x" * 41}] * 2}]),
    "weka": json.dumps(
        {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 1.0, "in": 130, "out": 2}]}
    ),
    "servegen": json.dumps(
        {"hist": {"input_tokens": {"9": 1.0}, "output_tokens": {"3": 1}}, "rate_per_window": {"0": 5, "60": 9}}
    ),
}
LENGTHS_ONLY = {"lengths", "vllm_custom", "sharegpt"}


def read(tmp_path: Path, text: str, **options: str) -> Trace:
    """Read a text as a trace, under a name that says nothing."""
    (tmp_path / "file").write_text(text)
    return read_trace(tmp_path / "file", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_each_format_is_known_by_its_content_alone(tmp_path: Path, name: str, packed: bool) -> None:
    data = SAMPLES[name].encode()
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(data) if packed else data)
    head = look(path)
    assert [n for n in trace_readers if trace_readers.build(n).matches(head)] == [name], "exactly one reader claims it"
    trace = read_trace(path, arrivals="poisson:rate=4" if name in LENGTHS_ONLY else None)
    assert len(trace) >= 1
    assert trace.same_requests(
        read_trace(path, format=name, arrivals="poisson:rate=4" if name in LENGTHS_ONLY else None)
    )


def test_every_built_in_format_has_a_sample_and_a_summary() -> None:
    assert set(SAMPLES) | {"weka_requests"} == set(trace_readers)
    for name in trace_readers:
        cls = trace_readers.get(name)
        assert issubclass(cls, TraceReader)
        assert 20 < len(cls.summary) < 110


def test_azure_keeps_100_ns_and_counts_from_the_first_row(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951691,396,109\n",
    )
    assert trace.arrival_ns.tolist() == [0, 4_314_579_100]
    assert trace.prompt_tokens.tolist() == [374, 396]


def test_azure_of_2024_with_and_without_offsets(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01,2399,6\n2024-05-10T02:00:02Z,1,1\n2024-05-10 04:00:03+02:00,76,7\n",
    )
    assert trace.arrival_ns.tolist() == [0, 990_070_000, 7_201_990_070_000, 7_202_990_070_000]


def test_rows_that_cannot_run_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,4\n"
        "2023-11-16 18:15:47,5,4\n2023-11-16 18:15:48,5,0\n",
    )
    assert len(trace) == 1
    assert trace.notes == ("left out 2 of 3 rows: 0 prompt or 0 output tokens",)


def test_burstgpt_failures_are_left_out_and_sessions_kept(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,7,1.5,ChatGPT,472,18,490,Conversation log\n6.5,,2,GPT-4,10,0,10,API log\n45.25,8,1,GPT-4,1,2,3,API log\n",
    )
    assert trace.arrival_ns.tolist() == [5 * 10**9, 45_250_000_000]
    assert list(trace.session or []) == ["7", "8"]
    assert trace.notes == ("left out 1 of 3 rows: failed requests (0 response tokens) or empty prompts",)


def test_rows_out_of_order_are_sorted_stably_with_a_note(tmp_path: Path) -> None:
    trace = read(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n2,1,9\n1,2,9\n1,3,9\n0,4,9\n")
    assert trace.prompt_tokens.tolist() == [4, 2, 3, 1]
    assert trace.notes == ("sorted by arrival: 2 rows were earlier than the one before",)


def test_lengths_without_times_need_an_arrival_process(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens\n374,44\n396,109\n"
    with pytest.raises(InputError, match=r"holds lengths only .*--arrivals poisson:rate=4"):
        read(tmp_path, text)
    trace = read(tmp_path, text, arrivals="poisson:rate=4")
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert (np.diff(trace.arrival_ns) > 0).all()
    with pytest.raises(InputError, match="prompt comes from the file"):
        read(tmp_path, text, arrivals="poisson:rate=4,prompt=3")
    with pytest.raises(InputError, match="has arrival times of its own"):
        read(tmp_path, SAMPLES["azure"], arrivals="poisson:rate=4")


def test_mooncake_times_are_ms_and_hashes_cover_512_tokens(tmp_path: Path) -> None:
    trace = read(tmp_path, SAMPLES["mooncake"])
    assert list(trace.requests()) == [Request("0", 27_000_000, 1300, 40, (0, 1, 2))]
    assert trace.hash_tokens == 512


def test_aiperf_sessions_texts_and_delays(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "session_id": "a", "text_input": "x" * 9, "output_length": 5},
        {"timestamp": 1200, "session_id": "b", "messages": [{"role": "user", "content": "x" * 8}], "output_length": 5},
        {"delay": 500, "session_id": "a", "input_length": 30, "output_length": 6},
        {"delay": 0.5, "session_id": "a", "payload": {"prompt": "x" * 4, "max_tokens": 9}},
    ]
    trace = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert [(r.arrival_ns, r.prompt_tokens, r.output_tokens, r.session) for r in trace.requests()] == [
        (1_000_000_000, 3, 5, "a"),
        (1_200_000_000, 2, 5, "b"),
        (1_500_000_000, 30, 6, "a"),
        (1_500_500_000, 1, 9, "a"),
    ]
    assert any("3 prompts are text" in note for note in trace.notes)
    assert any("2 turns have a delay only" in note for note in trace.notes)


def test_bailian_sessions_follow_the_parents(tmp_path: Path) -> None:
    rows = [(1, -1), (2, -1), (3, 1), (4, 3), (9, 77)]
    text = "".join(
        json.dumps(
            {"chat_id": chat, "parent_chat_id": parent, "timestamp": 0.1 * i, "input_length": 20, "output_length": 1}
            | {"hash_ids": [2**64 - 1, 5]}
        )
        + "\n"
        for i, (chat, parent) in enumerate(rows)
    )
    trace = read(tmp_path, text)
    assert list(trace.session or []) == ["1", "2", "1", "1", "77"]
    assert trace.hash_tokens == 16
    assert trace.arrival_ns.tolist() == [0, 100_000_000, 200_000_000, 300_000_000, 400_000_000]
    assert trace.prefix_hashes is not None
    assert trace.prefix_hashes[0].tolist() == [-1, 5], "unsigned ids keep their bits"


def test_llmservingsim_sub_requests_follow_their_tools(tmp_path: Path) -> None:
    session = {
        "session_id": "s",
        "arrival_time_ns": 100,
        "sub_requests": [
            {"input_toks": 10, "output_toks": 1, "tool_duration_ns": 50},
            {"input_toks": 20, "output_toks": 2, "tool_duration_ns": 0},
        ],
    }
    trace = read(tmp_path, json.dumps(session) + "\n" + SAMPLES["llmservingsim"])
    assert [(r.arrival_ns, r.prompt_tokens, r.session) for r in trace.requests()] == [
        (7, 128, None),
        (100, 10, "s"),
        (150, 20, "s"),
    ]
    assert trace.notes == ("1 later requests of sessions: placed the tool's time after the previous arrival",)


def test_sharegpt_filter_and_token_estimate(tmp_path: Path) -> None:
    def talk(*tokens: int) -> dict[str, object]:
        return {"conversations": [{"from": "x", "value": "", "tokens": n} for n in tokens]}

    items = [talk(4, 1), talk(3, 10), talk(1025, 10), talk(1024, 1024), talk(1024, 1025), talk(50), talk(7, 8, 9)]
    items.append({"conversations": [{"from": "human", "value": "x" * 17}, {"from": "gpt", "value": "x" * 4}]})
    trace = read(tmp_path, json.dumps(items, indent=1), arrivals="poisson:rate=1")
    assert list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) == [
        (4, 1),
        (1024, 1024),
        (7, 8),
        (5, 1),
    ]
    assert "left out 1 conversations of fewer than two turns and 3 with a prompt outside" in trace.notes[0]
    assert "1 conversations are text" in trace.notes[1]


def test_long_arrays_are_read_across_buffers(tmp_path: Path) -> None:
    items = [{"conversations": [{"value": "é" * (i * 997 % 4000 + 16)}, {"value": "y"}]} for i in range(200)]
    trace = read(tmp_path, json.dumps(items, ensure_ascii=False), arrivals="poisson:rate=1")
    assert len(trace) == 200
    assert trace.prompt_tokens[1] == (997 + 16 + 3) // 4


def test_vllm_custom_defaults(tmp_path: Path) -> None:
    trace = read(tmp_path, SAMPLES["vllm_custom"] + '{"prompt": "12345"}\n', arrivals="poisson:rate=1")
    assert trace.prompt_tokens.tolist() == [8, 2]
    assert trace.output_tokens.tolist() == [10, 256]
    assert any("1 prompts name no output length" in note for note in trace.notes)


def weka(name: str, requests: list[dict[str, object]]) -> str:
    return json.dumps({"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests})


def test_weka_subagents_are_moved_and_sessions_share_nothing(tmp_path: Path) -> None:
    plain: dict[str, object] = {"t": 0.0, "type": "n", "in": 130, "out": 20, "hash_ids": [1, 2]}
    agent = {"t": 3.0, "type": "subagent", "requests": [plain | {"t": 0.5, "out": 4}]}
    (tmp_path / "b.json").write_text(weka("two", [plain]))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(weka("one", [plain, agent, plain | {"t": 9.0}]).encode()))
    (tmp_path / "notes.txt").write_text("not a session")
    trace = read_trace(tmp_path)
    assert [(r.arrival_ns, r.session, r.output_tokens) for r in trace.requests()] == [
        (0, "one", 20),
        (0, "two", 20),
        (3_500_000_000, "one/1", 4),
        (9_000_000_000, "one", 20),
    ]
    assert trace.hash_tokens == 64
    assert trace.prefix_hashes is not None
    one, two, child, again = (set(ids.tolist()) for ids in trace.prefix_hashes)
    assert one == child == again
    assert not one & two
    assert trace.notes == ("all 2 sessions start at time 0: an arrival process would spread them",)
    spread = read_trace(tmp_path, arrivals="poisson:rate=0.01")
    assert spread.notes == ()
    starts = sorted(r.arrival_ns for r in spread.requests() if r.output_tokens == 20)
    assert starts[0] > 0


def test_servegen_draws_what_the_histograms_say(tmp_path: Path) -> None:
    hist = {"input_tokens": {"10": 3.0, "20": 1.0}, "output_tokens": {"5": 1}}
    text = json.dumps({"hist": hist, "rate_per_window": {"0": 10, "600": 40, "1200": 0}})
    trace = read(tmp_path, text)
    early, late = (trace.arrival_s < 600).sum(), (trace.arrival_s >= 600).sum()
    assert early == pytest.approx(6000, abs=5 * 6000**0.5)
    assert late == pytest.approx(24_000, abs=5 * 24_000**0.5)
    assert trace.arrival_s.max() < 1200, "the last window has rate 0"
    assert (trace.prompt_tokens == 10).mean() == pytest.approx(0.75, abs=0.02)
    assert set(trace.output_tokens.tolist()) == {5}
    (tmp_path / "file").write_text(text)
    one, other = (read_trace(tmp_path / "file", seed=seed) for seed in (0, 1))
    assert one.same_requests(trace)
    assert not one.same_requests(other)


def test_an_unknown_format_name_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text(SAMPLES["azure"])
    with pytest.raises(InputError, match=r"unknown trace format 'azur'.*did you mean 'azure'"):
        reader_for(tmp_path / "f.csv", "azur")


# ---- the real files --------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    ("name", "reader", "requests"),
    [
        ("azure_llm_2023_conv.csv", "azure", 19_366),
        ("azure_llm_2023_code.csv", "azure", 8_819),
        ("mooncake_fast25_conversation.jsonl", "mooncake", 12_031),
        ("vidur_arxiv_summarization_lengths.csv", "vidur", 28_257),
        ("sharegpt_first_turn_lengths.csv", "lengths", 5_997),
        ("sharegpt_turn_lengths.csv", "lengths", 5_223),
        ("weka_agentic_requests.parquet", "weka_requests", 49_307),
        ("weka_sessions_sample", "weka", 208),
        ("formats/azure.csv", "azure", 3),
        ("formats/bailian.jsonl", "bailian", 2),
        ("formats/burstgpt.csv", "burstgpt", 3),
        ("formats/llmservingsim.jsonl", "llmservingsim", 3),
        ("formats/mooncake.jsonl", "mooncake", 2),
        ("formats/sharegpt.json", "sharegpt", 1),
        ("formats/vidur.csv", "vidur", 2),
        ("formats/vllm_custom.jsonl", "vllm_custom", 1),
        ("formats/weka.json", "weka", 2),
    ],
)
def test_real_files(name: str, reader: str, requests: int) -> None:
    found = reader_for(SHARED / name)
    assert found.name == reader
    needs_arrivals = reader in {"lengths", "vllm_custom", "sharegpt"} or name.startswith("vidur")
    trace = read_trace(SHARED / name, arrivals="poisson:rate=4" if needs_arrivals else None)
    assert len(trace) == requests


@needs_shared
def test_the_mooncake_trace_is_what_is_known_of_it() -> None:
    trace = read_trace(SHARED / "mooncake_fast25_conversation.jsonl")
    description = trace.describe()
    assert description.equal_times == pytest.approx(0.90, abs=0.01)
    assert trace.prefix_hashes is not None
    assert all(ids[0] == 0 for ids in trace.prefix_hashes)
    covered = np.array([len(ids) for ids in trace.prefix_hashes])
    assert (covered == -(-trace.prompt_tokens // 512)).all()


@needs_shared
def test_the_servegen_day_streams() -> None:
    source = open_source(SHARED / "servegen_deepseek_r1_lengths.json")
    first = next(iter(source.chunks()))
    assert source.total is None
    assert first.arrival_s.max() < 600
    assert len(first) / 600 == pytest.approx(14.86, rel=0.1)


@needs_shared
def test_reference_traces_are_canonical() -> None:
    folder = SHARED.parent / "reference" / "vllm"
    counts = {path.parent.name: len(read_trace(path)) for path in sorted(folder.glob("*/trace.csv"))}
    assert len(counts) == 9
    assert counts["mooncake_prefix"] == 300
