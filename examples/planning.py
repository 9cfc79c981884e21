"""What would run for a model on chips that are not here, and why.

    python examples/planning.py

A plan is data: it compares equal, goes to JSON and back, and says what was passed over.
"""

import openmla
from openmla.planning.models import problem_for_model


def main() -> None:
    problem = problem_for_model("deepseek-v3.2", tokens=4096, context=65536, tp=8, dtype="fp8_656")
    print(problem)
    for target in ("h200", "b200", "mi355x", "a100", "cpu"):
        chosen = openmla.plan(problem, target)
        block = chosen.block
        tile = f"tile {block.tile_rows} x {block.tile_keys}" if block else "no tiles of a GPU"
        print(f"{target:7} {chosen.backend:10} {tile}")
        for reason in chosen.passed_over:
            print(f"        not {reason}")
        assert type(chosen).from_json(chosen.to_json()) == chosen

    try:
        openmla.plan(problem, "a100", backend="hopper")
    except openmla.Unsupported as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
