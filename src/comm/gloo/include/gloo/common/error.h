// Declarations that ProcessGroupGloo.hpp needs; see src/comm/gloo/README.md.
#pragma once
