"""Draw the whole DSA steps of a result of device/indexer_h200.py, in µs, part by part.

PYTHONPATH=src python benchmarks/indexer_step_picture.py benchmarks/results/indexer-h200-DATE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from openmla.explain.bars_picture import bars_picture

FORMS = {
    "selected rows": {"index_topk": "index_topk", "sparse attention": "attention"},
    "all keys, masked": {
        "index_topk with mask": "index_topk",
        "expansion": "expansion",
        "masked attention": "attention",
    },
}

if __name__ == "__main__":
    path = Path(sys.argv[1])
    record = json.loads(path.read_text())
    groups = {
        f"{step['step']}: {form}": {part: 1e3 * step["ms"][name] for name, part in parts.items()}
        for (step,) in record["step"].values()
        for form, parts in FORMS.items()
    }
    title = f"One layer's DSA step on an H200, {record['date']}"
    path.with_suffix(".svg").write_text(bars_picture(title, groups, "µs"), encoding="utf-8")
