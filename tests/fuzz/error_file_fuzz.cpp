// Error files: any bytes are read without harm, and any message written comes back.

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tessera/core/error_file.h"
#include "tessera/launch/failure.h"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string path =
      (std::filesystem::temp_directory_path() / ("tessera-fuzz-" + std::to_string(::getpid())))
          .string();
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  launch::RankFailure failure;
  launch::read_error_file(path, failure);
  std::remove(path.c_str());

  core::ErrorReport report;
  report.message = bytes;
  report.timestamp_ns = 12345;
  if (!core::write_error_file(path.c_str(), report)) std::abort();
  launch::RankFailure written;
  if (!launch::read_error_file(path, written) || written.error_ns != 12345) std::abort();
  std::remove(path.c_str());
  return 0;
}
