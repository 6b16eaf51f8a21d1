"""Which regressor makes the best table of an emulated device's steps: AdaptiveLLM's eight, each on polynomial features of degree 1 to 5 (D1).

Each is trained on the samples that `predictors.profile` takes, with the noise that a real engine has. The server has the one of `predict/steps.py`.
`python -m bench.emulated.regressors` prints a table, and a line of JSON at the end.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from sklearn import ensemble, linear_model, neighbors, tree

from bench.emulated.adaptivellm import ARMS, MODELS, Setting, engine_of
from bench.emulated.predictors import bounds_of, samples_of
from engine_bridge.predict.steps import fit_steps, fitted

REGRESSORS: dict[str, Callable[[], Any]] = {
    "linear": linear_model.LinearRegression,
    "tree": partial(tree.DecisionTreeRegressor, random_state=0),
    "forest": partial(ensemble.RandomForestRegressor, n_estimators=50, random_state=0),
    "ridge": partial(linear_model.Ridge, alpha=1e-3),
    "lasso": partial(linear_model.Lasso, alpha=1e-3, max_iter=2000),
    "elastic_net": partial(linear_model.ElasticNet, alpha=1e-3, max_iter=2000),
    "gradient_boosting": partial(ensemble.GradientBoostingRegressor, random_state=0),
    "nearest": partial(neighbors.KNeighborsRegressor, 5, weights="distance"),
}
DEGREES, SEEDS = (1, 2, 3, 4, 5), (1, 2)


def main() -> None:
    """Print the mean relative error of each table on held-out points, the median over models and seeds, the best first."""
    settings = [Setting(model) for model in MODELS.values()]
    samples = [
        samples_of(each.gpu, each.model, bounds_of(engine_of(ARMS["adaptive"], each)), seed)
        for each in settings
        for seed in SEEDS
    ]
    errors = {}
    for (name, make), degree in itertools.product(REGRESSORS.items(), DEGREES):
        found = [
            fit_steps(of, train=lambda kept: fitted(make(), degree, kept, is_weighted=name != "nearest"))  # noqa: B023 (called here)
            for of in samples
        ]
        errors[f"{name}, degree {degree}"] = round(statistics.median(fit.error for fit in found), 4)
    for name, error in sorted(errors.items(), key=lambda item: item[1]):
        print(f"{name:<30}{error:>8.2%}")
    print(json.dumps({"bench": "emulated regressors", "table_error": errors}))


if __name__ == "__main__":
    main()
