"""Follows a run of `tessera train` and hands every figure to Weights & Biases, or prints it without.

tessera train dlrm --ranks 2 --save runs/shop &
python examples/follow_run.py runs/shop
"""

from __future__ import annotations

import sys

from tessera import runs


def main() -> None:
    """Follow the run to its end."""
    folder = sys.argv[1]
    try:
        import wandb

        log = wandb.init(project="tessera", name=folder).log
    except ImportError:

        def log(figures: dict[str, float], step: int) -> None:
            print(step, figures)

    def tell(metrics: runs.Metrics) -> None:
        if metrics.figures:
            log(
                {f"{metrics.kind}/{name}": value for name, value in metrics.figures.items()},
                step=metrics.step,
            )

    runs.follow(folder, tell, timeout=600)


if __name__ == "__main__":
    main()
