"""What both builders are told: the profiles, pools that are updated in place, layers that say what they compute."""

from collections.abc import Sequence
from typing import Any

from ingot.plugins.tensorrt.builder_bindings import Builder, IBuilderConfig
from ingot.plugins.tensorrt.tensors import InputRanges


def configure(trt: Any, builder: Builder, profiles: Sequence[InputRanges]) -> IBuilderConfig:
    """profiles: of `tensors.input_ranges`."""
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.clear_flag(trt.BuilderFlag.TF32)  # f32 means float32
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.max_aux_streams = 0  # one stream, which can be captured
    for each in profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in each.items():
            least, usual, most = map(tuple, shapes)
            profile.set_shape(name, least, usual, most)
        config.add_optimization_profile(profile)
    return config
