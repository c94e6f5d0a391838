// Stands where the core library of TensorRT is looked for, so that its bindings can be read where it is not installed:
// every door that they name is there, and nothing is behind it.
#define NOTHING(name) \
  void* name() { return nullptr; }

extern "C" {
NOTHING(createInferBuilder_INTERNAL)
NOTHING(createInferRefitter_INTERNAL)
NOTHING(createInferRuntime_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL)
NOTHING(createNvOnnxParser_INTERNAL)
NOTHING(getBuilderPluginRegistry)
NOTHING(getPluginRegistry)
int getNvOnnxParserVersion() { return 0; }
bool initLibNvInferPlugins() { return false; }
}
