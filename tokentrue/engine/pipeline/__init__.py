"""One model over several processes, each with some of its layers."""

from tokentrue.engine.pipeline.driver import Pipeline, start_pipeline
from tokentrue.engine.pipeline.plan import PipelinePlan

__all__ = ["Pipeline", "PipelinePlan", "start_pipeline"]
