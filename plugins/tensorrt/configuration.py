"""What both builders are told: the profiles, pools that are updated in place, layers that say what they compute."""

from typing import Any

from ingot.plan import Plan
from ingot.plugins.tensorrt.builder_bindings import Builder, IBuilderConfig
from ingot.plugins.tensorrt.tensors import Dim, Range, pools, profiles, step_inputs


def configure(trt: Any, builder: Builder, plan: Plan) -> IBuilderConfig:
    """Two profiles, each with the shapes of all inputs that change from step to step."""
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.clear_flag(trt.BuilderFlag.TF32)  # f32 means float32
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.max_aux_streams = 0  # one stream, which can be captured
    for each in profiles(plan):
        profile = builder.create_optimization_profile()
        for tensor in (*step_inputs(plan), *pools(plan)):
            spans = [each.ranges[length] if isinstance(length, Dim) else _fixed(length) for length in tensor.shape]
            least, usual, most = (tuple(getattr(span, end) for span in spans) for end in ("least", "usual", "most"))
            profile.set_shape(tensor.name, least, usual, most)
        config.add_optimization_profile(profile)
    return config


def _fixed(length: int) -> Range:
    return Range(least=length, usual=length, most=length)
