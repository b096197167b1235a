// report/html.h — text and numbers as they stand in a page.

#pragma once

#include <string>
#include <string_view>

namespace tessera::workloads::report {

/// `text` with the five characters that mean something in HTML written as references.
std::string escape(std::string_view text);

/// Text for a script of JSON inside a page: no `<` stays, so nothing in it can end the script.
std::string escape_json(std::string_view json);

/// Six significant digits, without zeros at the end; a dash for what is not a number.
std::string number(double value);
/// "812", "21.3k", "4.05M".
std::string short_number(double value);
/// "512 B", "1.2 MB", "3.4 GB"; thousands, not powers of two.
std::string bytes_text(double bytes);
/// "850 µs", "12.3 ms", "4.1 s", "5 min 20 s".
std::string seconds_text(double seconds);

}  // namespace tessera::workloads::report
