// tessera completion — lets a shell complete verbs and flags.

#include <cstdio>

#include "flags.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera completion bash|zsh|fish

  source <(tessera completion bash)             for this shell
  tessera completion fish > ~/.config/fish/completions/tessera.fish

Prints a script for the shell: verbs, what may stand behind them, flags and the words that flags
take are completed, then file names.
)";

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::string verb_names() {
  std::string text = "help";
  for (const Verb* verb : verbs()) text += " " + std::string(verb->name);
  return text;
}

std::string bash_script() {
  std::string text =
      "_tessera() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} words=\n"
      "  if [[ $COMP_CWORD == 1 ]]; then\n"
      "    words='" +
      verb_names() +
      " --help --version'\n"
      "  else case ${COMP_WORDS[1]} in\n"
      "    help) words='" +
      verb_names() + "' ;;\n";
  for (const Verb* verb : verbs()) {
    text += "    " + std::string(verb->name) + ") if [[ $word == -* ]]; then words='" +
            joined(verb->flags()) + "'";
    if (!verb->subjects.empty()) {
      text += "; elif [[ $COMP_CWORD == 2 ]]; then words='" + std::string(verb->subjects) + "'";
    }
    text += "; fi";
    if (verb->values != nullptr) {
      text += "\n      case ${COMP_WORDS[COMP_CWORD-1]} in";
      for (const auto& [flag, words] : verb->values())
        text += " " + flag + ") words='" + words + "' ;;";
      text += " esac";
    }
    text += " ;;\n";
  }
  return text +
         "  esac; fi\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
         "}\n"
         "complete -o default -F _tessera tessera\n";
}

std::string fish_script() {
  std::string text = "complete -c tessera -n __fish_use_subcommand -f -a '" + verb_names() + "'\n";
  for (const Verb* verb : verbs()) {
    if (!verb->subjects.empty()) {
      text += "complete -c tessera -n '__fish_seen_subcommand_from " + std::string(verb->name) +
              "' -a '" + std::string(verb->subjects) + "'\n";
    }
    const auto values =
        verb->values == nullptr ? std::map<std::string, std::string>() : verb->values();
    for (const std::string& flag : verb->flags()) {
      const auto words = values.find(flag);
      text += "complete -c tessera -n '__fish_seen_subcommand_from " + std::string(verb->name) +
              "' -l " + flag.substr(2) +
              (words == values.end() ? "" : " -x -a '" + words->second + "'") + "\n";
    }
  }
  return text;
}

int run(const std::vector<std::string>& words) {
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h")) return print_help(kHelp);
  if (words.size() != 1) throw UsageError("completion: name one shell: bash, zsh or fish");
  std::string script;
  if (words[0] == "bash") {
    script = bash_script();
  } else if (words[0] == "zsh") {
    script = "autoload -U +X bashcompinit && bashcompinit\n" + bash_script();
  } else if (words[0] == "fish") {
    script = fish_script();
  } else {
    throw UsageError("completion: unknown shell '" + words[0] + "'" +
                     suggestion(words[0], {"bash", "zsh", "fish"}));
  }
  std::fputs(script.c_str(), stdout);
  return 0;
}

std::vector<std::string> flags() { return {"--help"}; }

}  // namespace

const Verb kCompletionVerb{"completion", "print a completion script for bash, zsh or fish",
                           kHelp,        run,
                           flags,        "bash zsh fish"};

}  // namespace tessera::cli
