// What every file of kernels begins with: compiled once for all of them.
#include <utility>

#include "emulated_device.h"
