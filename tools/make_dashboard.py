"""Writes configs/grafana.json, the Grafana dashboard of jaxserve's metrics.

python tools/make_dashboard.py > configs/grafana.json
"""

from __future__ import annotations

import json

# Title, unit, and (query, legend) of each panel; $r is the rate window.
PANELS = [
    ("Requests", "short", [("jaxserve:num_requests_running", "running"),
                           ("jaxserve:num_requests_waiting", "waiting"),
                           ("jaxserve:num_slots", "slots")]),
    ("Tokens a second", "short", [("rate(jaxserve:generation_tokens_total[$r])", "output"),
                                  ("rate(jaxserve:prompt_tokens_total[$r])", "prompt"),
                                  ("rate(jaxserve:computed_tokens_total[$r])", "computed")]),
    ("Time to first token", "s", "jaxserve:time_to_first_token_seconds"),
    ("Gap between tokens", "s", "jaxserve:inter_token_latency_seconds"),
    ("Whole request", "s", "jaxserve:e2e_request_latency_seconds"),
    ("Step", "s", "jaxserve:step_seconds"),
    ("Slots busy", "percentunit",
     [("sum(rate(jaxserve:busy_slot_seconds_total[$r]))"
       " / sum(rate(jaxserve:slot_seconds_total[$r]))", "while steps run"),
      ('rate(jaxserve:busy_slot_seconds_total{waiting="yes"}[$r])'
       ' / rate(jaxserve:slot_seconds_total{waiting="yes"}[$r])', "while requests wait")]),
    ("KV pages in use", "percentunit", [("jaxserve:kv_cache_usage_ratio", "in use")]),
    ("Prompt tokens from the cache", "percentunit",
     [("rate(jaxserve:prefix_cache_hits_total[$r]) / rate(jaxserve:prompt_tokens_total[$r])",
       "cached")]),
    ("Ends, by reason", "reqps",
     [("sum by (finished_reason) (rate(jaxserve:request_success_total[$r]))",
       "{{finished_reason}}")]),
    ("Refusals, by cause", "reqps",
     [("sum by (code) (rate(jaxserve:requests_refused_total[$r]))", "{{code}}")]),
    ("Preemptions and late compilations", "short",
     [("rate(jaxserve:preemptions_total[$r])", "preemptions a second"),
      ("jaxserve:compilations_total", "compilations after warm-up")]),
    ("Guard", "short", [("jaxserve:guard_action", "{{action}}")]),
    ("Resident memory", "bytes", [("process_resident_memory_bytes", "server")]),
]  # fmt: skip


def quantiles(histogram: str) -> list[tuple[str, str]]:
    buckets = f"sum by (le) (rate({histogram}_bucket[$r]))"
    return [(f"histogram_quantile({q}, {buckets})", f"p{100 * q:.0f}") for q in (0.5, 0.9, 0.99)]


def panel(index: int, title: str, unit: str, queries) -> dict:
    """One graph; three stand in a row."""
    queries = quantiles(queries) if isinstance(queries, str) else queries
    targets = [
        {"refId": chr(65 + i), "expr": expr.replace("$r", "$__rate_interval"), "legendFormat": name}
        for i, (expr, name) in enumerate(queries)
    ]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": 8 * (index % 3), "y": 8 * (index // 3), "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "title": "jaxserve",
        "uid": "jaxserve",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": [panel(i, *spec) for i, spec in enumerate(PANELS)],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
