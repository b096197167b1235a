// Writes the same two clicks as logs, by the C++ class and by the C functions.

#include <cstdio>

#include <dlrm/click_file.h>
#include <tessera/data/click_api.h>

namespace {

void write_by_class(const char* path) {
  using namespace tessera::workloads::dlrm;
  ClickFileWriter writer(path, {/*num_dense=*/1, {{"user", 100}, {"tags", 10, /*bag_size=*/0}}});
  writer.append({2, {1, 0}, {2.5F, 7.0F}, {1, 1, 2, 0}, {3, 4, 1, 2}});
  writer.finish();
}

bool write_by_functions(const char* path) {
  const tessera_click_feature features[] = {{"user", 100, 1, 0, 0}, {"tags", 10, 0, 0, 0}};
  const float labels[] = {1, 0};
  const float dense[] = {2.5F, 7.0F};
  const int32_t lengths[] = {1, 1, 2, 0};
  const int64_t ids[] = {3, 4, 1, 2};
  char error[256] = "";
  tessera_click_writer* writer = nullptr;
  const bool is_written =
      tessera_click_writer_open(path, 1, nullptr, features, 2, 0, &writer, error, 256) == 0 &&
      tessera_click_writer_append(writer, 2, labels, dense, lengths, ids, 4, error, 256) == 0 &&
      tessera_click_writer_finish(writer, error, 256) == 0;
  tessera_click_writer_close(writer);
  if (!is_written) std::fprintf(stderr, "%s\n", error);
  return is_written;
}

}  // namespace

int main(int /*count*/, char** words) {
  write_by_class(words[1]);
  return write_by_functions(words[2]) ? 0 : 1;
}
