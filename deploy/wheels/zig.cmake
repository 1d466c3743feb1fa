# Compiles for another machine and for an old glibc with the clang of the PyPI package ziglang, which brings the headers and
# symbol versions of each. libc++ is linked statically: a wheel needs nothing but libc and libm of the machine it runs on.
#
# MONOLITH_TARGET is x86_64 or aarch64, MONOLITH_ZIG the program of ziglang.
set(glibc 2.28)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MONOLITH_TARGET MONOLITH_ZIG)

# Checks of the compiler compile, but do not link: the first link builds libc++.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${MONOLITH_TARGET})
set(CMAKE_CXX_COMPILER ${MONOLITH_ZIG} c++ -target ${MONOLITH_TARGET}-linux-gnu.${glibc})
# CMake takes one program without arguments here.
foreach(tool ar ranlib)
  string(TOUPPER ${tool} name)
  set(script ${CMAKE_BINARY_DIR}/zig-${tool})
  if(NOT EXISTS ${script})
    file(WRITE ${script} "#!/bin/sh\nexec '${MONOLITH_ZIG}' ${tool} \"$@\"\n")
    file(CHMOD ${script} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  endif()
  set(CMAKE_${name} ${script} CACHE FILEPATH "")
endforeach()
# Code of different instruction sets is kept in objects of its own. nanobind uses stderr and relies on others to include its header,
# which with the stable ABI and libc++ nobody does.
set(CMAKE_CXX_FLAGS_INIT "-fno-lto -include stdio.h")
# The linker strips: strip of this machine does not know the format of another.
set(CMAKE_STRIP "" CACHE FILEPATH "")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,-s -Wl,--gc-sections")
