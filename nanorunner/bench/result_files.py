"""Read a folder of results: a sweep's rows, result files, and the older files of bench_engine.py.

    rows.jsonl          a sweep (journal.py): its good rows become records, its failed ones failures
    *.json              {"kind": latency | throughput | load}   result.py's form
                        {"kind": compare}                       a record for each side
                        {"engine": "nanorunner", "loads": ...}  scripts/bench_engine.py's form
    anything else       skipped, with the reason

Nothing is skipped in silence: what no figure shows is named in the report.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanorunner.bench.cli import MEASURING
from nanorunner.bench.journal import FILE_NAME, Row, latest, read_rows
from nanorunner.bench.metrics import METRICS
from nanorunner.bench.records import Record, Shape, Values, together
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse
from nanorunner.workers.model_config import Llama3Rope, ModelConfig

# a flag's second name -> what a setting is called in a figure
ONE_NAME = {"batch_size": "batch"}
# What read_result() raises for an object that is no result, however it is wrong.
NOT_A_RESULT = (ValueError, KeyError, TypeError, AttributeError)


@dataclass
class Found:
    """What a folder holds."""

    records: list[Record] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)  # rows without a result
    skipped: dict[str, str] = field(default_factory=dict)  # file -> why


def read_folder(folder: Path) -> Found:
    """Return every record in a folder; ValueError when it is no folder or a row is damaged."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one that a sweep or --out wrote to")
    found = Found()
    rows, num_torn_bytes = read_rows(folder / FILE_NAME)
    _read_rows(list(latest(rows).values()), found)
    if num_torn_bytes:
        found.skipped[FILE_NAME] = f"its last line is torn ({num_torn_bytes} bytes)"
    for path in sorted(folder.glob("*.json")):
        try:
            found.records += read_result(json.loads(path.read_text(encoding="utf-8")), path.name)
        except NOT_A_RESULT as error:
            found.skipped[path.name] = reason(error)
    found.records = together(found.records)
    return found


def records_of(rows: list[Row]) -> list[Record]:
    """Return the points of a sweep's rows, the repeats of each together; failed rows left out."""
    found = Found()
    _read_rows(rows, found)
    return together(found.records)


def _read_rows(rows: list[Row], found: Found) -> None:
    # as the spec lists the points, not as chance ran them; repeats in their own order
    for row in sorted(rows, key=lambda row: (row["point"], row["repeat"])):
        if row["status"] != "ok":
            found.failures.append(row)
            continue
        try:
            found.records += read_result(row["result"], FILE_NAME, row["settings"], row["varied"])
        except NOT_A_RESULT as error:
            found.skipped[f"row {row['key']}"] = reason(error)


def reason(error: Exception) -> str:
    """Return why an object is no result, for one of NOT_A_RESULT."""
    return f"has no {error}" if isinstance(error, KeyError) else str(error)


def read_result(
    result: Any,
    source: str,
    asked: dict[str, Any] | None = None,
    varied: list[str] | None = None,
) -> list[Record]:
    """Return the records of one result object.

    asked, varied: the settings of its point and those that its sweep varied. Raises NOT_A_RESULT:
    ValueError for an object of another kind, KeyError for one that lacks what its kind has.
    """
    if not isinstance(result, dict):
        raise ValueError("is no result of a benchmark")
    if result.get("kind") in MEASURING:
        return [_record(result, source, asked or {}, varied)]
    if result.get("kind") == "compare":
        return [_side_record(side, source) for side in result["sides"]]
    if result.get("engine") == "nanorunner" and "loads" in result:
        return [_old_record(result, name, source) for name in result["loads"]]
    raise ValueError("is no result of `nanorunner bench` or of scripts/bench_engine.py")


def _record(
    result: dict[str, Any], source: str, asked: dict[str, Any], varied: list[str] | None
) -> Record:
    config, workload = result["config"], result["workload"]
    shape = _shape(workload, config)
    settings = {
        **{name: value for name, value in config.items() if _is_plain(value)},
        "workload": workload.get("name"),
        **({} if shape is None else shape._asdict()),
        **{ONE_NAME.get(name, name): value for name, value in asked.items()},
    }
    settings["model"] = settings.get("model") or "SmolLM2-135M-Instruct"
    return Record(
        source=source,
        kind=result["kind"],
        settings=settings,
        varied=None if varied is None else tuple(ONE_NAME.get(name, name) for name in varied),
        metrics=_metrics(result),
        machine=result["machine"],
        commit=str(result.get("commit")),
        command=str(result.get("command", "")),
        time=str(result.get("time", "")),
        device=_device(config, result["machine"]),
        shape=shape,
        model=_model(result.get("model")),
        step_ms=_step_ms(result),
        counters=result.get("counters", {}),
    )


def _side_record(side: dict[str, Any], source: str) -> Record:
    """Return one side of a comparison; its name says the runner."""
    record = _record(side["result"], source, {"side": side["side"]}, None)
    settings = {name: value for name, value in record.settings.items() if name != "runner"}
    return replace(record, kind="compare", settings=settings)


def _metrics(result: dict[str, Any]) -> dict[str, Values]:
    return {
        name: Values(
            values=tuple(each[name] for each in result["repeats"] if each.get(name) is not None),
            unit=str(summary.get("unit", "")),
        )
        for name, summary in result["metrics"].items()
        if any(each.get(name) is not None for each in result["repeats"])
    }


def _shape(workload: dict[str, Any], config: dict[str, Any]) -> Shape | None:
    """Return the one batch that a workload is; None when lengths or arrivals differ."""
    lengths = [workload.get("input_len"), workload.get("output_len")]
    arrivals = workload.get("arrivals") or {}
    if arrivals.get("kind", "all") != "all":
        return None
    if workload["requests"] > config["max_num_seqs"]:
        return None  # they wait for one another: no single batch
    if not all(isinstance(each, dict) and each["min"] == each["max"] for each in lengths):
        return None
    input_len, output_len = (int(each["min"]) for each in lengths if each is not None)
    return Shape(int(workload["requests"]), input_len, output_len)


def _device(config: dict[str, Any], machine: dict[str, Any]) -> str:
    gpus = machine.get("gpus") or []
    return str(gpus[0]) if gpus and config.get("device") == "cuda" else ""


def _model(fields: dict[str, Any] | None) -> ModelConfig | None:
    if fields is None:
        return None
    scaling = fields.get("rope_scaling")
    return ModelConfig(**{**fields, "rope_scaling": scaling and Llama3Rope(**scaling)})


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _old_record(result: dict[str, Any], name: str, source: str) -> Record:
    """Return a load of scripts/bench_engine.py; its rates are of each repeat's seconds."""
    load, config = result["loads"][name], result["config"]
    seconds = [float(value) for value in load["seconds"]]
    amounts = {
        "output_tokens_per_s": load["output_tokens"],
        "input_tokens_per_s": load["input_tokens"],
        "requests_per_s": load["requests"],
    }
    metrics = {
        metric: Values(values=tuple(amount / each for each in seconds), unit=METRICS[metric].unit)
        for metric, amount in amounts.items()
    }
    metrics["duration_s"] = Values(values=tuple(seconds), unit="s")
    shape = None
    if name != "nano":  # every other load is one batch of equal requests
        requests = load["requests"]
        shape = Shape(requests, load["input_tokens"] // requests, load["output_tokens"] // requests)
    settings = {
        **{key: value for key, value in config.items() if _is_plain(value)},
        "model": result["model"],
        **({"workload": name} if shape is None else shape._asdict()),
    }
    return Record(
        source=source,
        kind="engine",
        settings=settings,
        varied=None,
        metrics=metrics,
        machine=result["versions"],
        commit=str(result["versions"].get("commit")),
        command=result["command"],
        time=result["date"],
        device=_device(config, result["versions"]),
        shape=shape,
        model=parse(load_preset(result["model"])),
        counters={"scheduler": load.get("scheduler", {})},
    )


def _step_ms(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the means of a result's step times by kind, empty where it has none."""
    times: dict[str, dict[str, float]] = {}
    for name, part in result.get("steps", {}).get("parts", {}).items():
        times.setdefault(part["kind"], {})[name] = part["mean_us"] / 1000
    return times
