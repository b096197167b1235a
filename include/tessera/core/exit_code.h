// tessera/core/exit_code.h — the numbers that programs of ours end with.
//
// A rank's own code passes through the launcher unchanged.

#pragma once

namespace tessera::core {

inline constexpr int kExitOk = 0;
inline constexpr int kExitUsage = 2;           // wrong command line
inline constexpr int kExitData = 65;           // a file or a checkpoint cannot be used
inline constexpr int kExitRendezvous = 69;     // a host is missing, or a port is taken
inline constexpr int kExitInternal = 70;       // the launcher itself failed
inline constexpr int kExitLostPeer = 75;       // a peer, or the launcher of another host, is gone
inline constexpr int kExitConfiguration = 78;  // a configuration file cannot be used
inline constexpr int kExitNotExecutable = 126;
inline constexpr int kExitNotFound = 127;

/// Returns the shell's code for a process ended by `signal_number`.
constexpr int exit_code_of_signal(int signal_number) noexcept { return 128 + signal_number; }

}  // namespace tessera::core
