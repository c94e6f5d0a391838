// Waits for rows of the stage before, and copies them: 4 bytes in and 4 out per element.
#pragma once

#include "ingot/kernel.h"
#include "ranks/recv_args.h"

namespace ingot {
namespace {

void recv(const RecvArgs& args, const Team& team) {
  args.group->receive(team, args.message, args.y, args.rows * args.cols);  // who fails is found after the step
}

}  // namespace
}  // namespace ingot
