#include "program.h"

#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {
namespace {

bool is_directory(const std::string& path) {
  struct stat status{};
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

bool can_execute(const std::string& path) {
  return access(path.c_str(), X_OK) == 0 && !is_directory(path);
}

// Empty if no folder of PATH has it.
std::string find_in_path(const std::string& name) {
  const char* variable = std::getenv("PATH");
  std::string folders = variable != nullptr ? variable : "/usr/local/bin:/usr/bin:/bin";
  for (size_t begin = 0; begin <= folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    const std::string folder = end > begin ? folders.substr(begin, end - begin) : ".";
    const std::string candidate = folder + "/" + name;
    if (can_execute(candidate)) return candidate;
    begin = end + 1;
  }
  return "";
}

// The Python of the virtual environment this program is installed in, if none is active.
std::string python_beside_launcher() {
  namespace fs = std::filesystem;
  const auto* called = reinterpret_cast<const char*>(getauxval(AT_EXECFN));
  if (called == nullptr || std::getenv("VIRTUAL_ENV") != nullptr) return "";
  std::error_code ignored;
  const fs::path folder = fs::absolute(called, ignored).parent_path();
  const std::string python = folder / "python3";
  return exists(folder.parent_path() / "pyvenv.cfg") && can_execute(python) ? python : "";
}

std::string find_python() {
  if (const char* named = std::getenv("PYTHON_EXEC"); named != nullptr && *named != '\0') {
    if (can_execute(named)) return named;
    throw LaunchError(kExitNotFound, std::string("run: PYTHON_EXEC names '") + named + "'",
                      "there is no such program", "unset it, or set it to the path of a Python");
  }
  std::string python = python_beside_launcher();
  if (python.empty()) python = find_in_path("python3");
  if (python.empty()) python = find_in_path("python");
  if (!python.empty()) return python;
  throw LaunchError(kExitNotFound, "run: there is no python3 in PATH", "the program is Python code",
                    "activate its environment, or set PYTHON_EXEC");
}

bool is_python_script(const std::string& name) {
  return name.size() > 3 && name.compare(name.size() - 3, 3, ".py") == 0;
}

[[noreturn]] void throw_not_found(const std::string& name) {
  if (name.find('/') == std::string::npos && exists(name)) {
    throw LaunchError(kExitNotFound, "run: program '" + name + "' not found",
                      "it is in this folder, but the folder is not in PATH", "write ./" + name);
  }
  throw LaunchError(
      kExitNotFound, "run: program '" + name + "' not found",
      name.find('/') == std::string::npos ? "no folder of PATH has it" : "there is no such file",
      "check the path; words before the program are options of tessera run");
}

[[noreturn]] void throw_not_executable(const std::string& path) {
  const bool is_folder = is_directory(path);
  throw LaunchError(kExitNotExecutable, "run: '" + path + "' cannot be executed",
                    is_folder ? "it is a folder" : "the file has no execute permission",
                    is_folder ? "name the program inside it" : "chmod +x " + path);
}

}  // namespace

Program resolve_program(const RunOptions& options) {
  const std::string& name = options.command.front();
  Program program;
  if (options.is_module || (options.use_python && is_python_script(name))) {
    if (!options.is_module && !exists(name)) throw_not_found(name);
    program.path = find_python();
    program.arguments = {program.path, "-u"};
    if (options.is_module) program.arguments.emplace_back("-m");
  } else if (name.find('/') != std::string::npos) {
    if (!exists(name)) throw_not_found(name);
    if (!can_execute(name)) throw_not_executable(name);
    program.path = name;
  } else {
    program.path = find_in_path(name);
    if (program.path.empty()) throw_not_found(name);
  }
  program.arguments.insert(program.arguments.end(), options.command.begin(), options.command.end());
  return program;
}

}  // namespace tessera::launch
