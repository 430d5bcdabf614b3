# SPDX-License-Identifier: Apache-2.0
"""Planning a run without a GPU: memory by part, time, bytes on the wire, and what fits."""

from lightning_cp.planner.plan_run import RunPlan, plan_run
from lightning_cp.planner.setup import Setup
from lightning_cp.planner.shapes import KNOWN, LayerShape, ModelShape

__all__ = [
    "KNOWN",
    "LayerShape",
    "ModelShape",
    "RunPlan",
    "Setup",
    "plan_run",
]
