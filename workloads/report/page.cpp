#include "report/page.h"

#include "report/html.h"
#include "report/page_template.h"
#include "report/run_folder.h"

namespace tessera::workloads::report {
namespace {

void fill(std::string& page, const std::string& name, const std::string& text) {
  const std::string place = "{{" + name + "}}";
  page.replace(page.find(place), place.size(), text);
}

}  // namespace

std::string filled_page(const std::string& title, const char* script,
                        const nlohmann::ordered_json& data) {
  std::string page = kPageTemplate;
  fill(page, "style", kPageStyle);
  fill(page, "script", script);
  fill(page, "title", escape(title + " · tessera"));
  // Last: nothing in it is taken for a place to fill. Names may be of any encoding.
  const auto replace = nlohmann::ordered_json::error_handler_t::replace;
  fill(page, "data", escape_json(data.dump(-1, ' ', false, replace)));
  return page;
}

std::string make_page(const RunRecord& run) {
  return filled_page(run.name, kPageScript, page_data(run));
}

std::string write_report(const std::string& folder) {
  std::string path = folder;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  path += std::string("/") + kReportFile;
  write_text(path, make_page(read_run(folder)));
  return path;
}

}  // namespace tessera::workloads::report
