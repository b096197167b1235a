// src/core/own_files.h — sockets that end with this process, whatever children it has forked.
//
// A forked child has a copy of every descriptor. The other end of a connection then sees it close
// when the last of them ends, and a death is noticed only when the children have ended too.

#pragma once

namespace tessera::core {

/// Has children that are forked from now on let go of `socket`. Its number stays taken in them, so
/// that closing it there harms nothing of theirs. Needs no word when the socket is closed. What is
/// no socket stays as it is.
void keep_from_children(int socket) noexcept;

}  // namespace tessera::core
