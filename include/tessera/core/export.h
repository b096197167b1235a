// tessera/core/export.h — marks what the shared library shows to its users.

#pragma once

#define TESSERA_API __attribute__((visibility("default")))
