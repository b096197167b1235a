// Declarations that ProcessGroupGloo.hpp needs; see src/comm/gloo/README.md.
#pragma once

namespace gloo::transport {

class Device;
class UnboundBuffer;

}  // namespace gloo::transport
