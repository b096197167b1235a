// trainer/last_words.h — what a program of ranks says when it cannot go on.

#pragma once

#include <cstdio>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/core/error_file.h"

namespace tessera::trainer {

/// Says on standard error why this rank ends, and leaves it for the launcher, which sees no
/// standard error where it starts one rank only.
inline void say_last_words(const std::string& text) {
  std::fprintf(stderr, "error: %s\n", text.c_str());
  core::write_error_file({.message = text});
}

/// The same mistake on all ranks of `world`: one says so, all leave it for the launcher. Returns
/// `code`.
inline int end_alike(const comm::Group& world, const std::string& text, int code) {
  if (world.rank() == 0) {
    say_last_words(text);
  } else {
    core::write_error_file({.message = text});
  }
  return code;
}

}  // namespace tessera::trainer
