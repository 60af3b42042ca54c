# PIECES, files of text, become one C++ file: their contents one after the other, as strings; and PROGRAM, the same as
# a compiler takes it.
set(strings "")
set(all "")
foreach(piece ${PIECES})
    file(READ "${piece}" text)
    string(APPEND strings "    R\"lowkv(${text})lowkv\",\n")
    string(APPEND all "${text}")
endforeach()
file(WRITE "${PROGRAM}" "${all}")
file(WRITE "${OUT}" "#include \"queue.h\"

namespace lowkv::opencl {
namespace {
const char* const pieces[] = {
${strings}};
}
const std::span<const char* const> program_text = pieces;
}  // namespace lowkv::opencl
")
